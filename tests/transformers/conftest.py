import pytest

from lora_core.integrations.transformers import attach, detach
from tests.transformers.tiny import workbench


@pytest.fixture
def attached():
    """A function: (family) -> workbench and manager, with all adapters loaded; detached afterwards."""
    models = []

    def build(name, *, adapters=None, **options):
        bench = workbench(name)
        manager = attach(bench.model, "torch", **options)
        models.append(bench.model)
        for adapter in bench.folders if adapters is None else adapters:
            manager.load_adapter(adapter, bench.folders[adapter])
        return bench, manager

    yield build
    for model in models:
        if "_lora_core" in vars(model):
            detach(model)
