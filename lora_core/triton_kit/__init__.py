"""What authors of Triton backends share: dots, tile tables, bound launches, ahead-of-time checks.

Public: a third-party plugin may depend on it (`pip install lora-core[triton]`) without depending on
any shipped plugin's kernels. Nothing here knows a backend; importing it imports triton.

- `dot`, `add_product`: matrix products that are right in the interpreter too, IEEE in float32.
- `Tile`, `Rule`, `TileTable`, `family`: launch parameters as data, first match wins.
- `Launch`: a kernel whose signature is bound once, so that an eager call costs microseconds.
- `AotCase` and `python -m lora_core.triton_kit.aot`: compile without a GPU, bound the resources.
"""

from lora_core.triton_kit.aot import AotCase
from lora_core.triton_kit.dot import add_product, dot
from lora_core.triton_kit.launch import INTERPRETED, Fixed, Launch
from lora_core.triton_kit.tiles import Rule, Tile, TileTable, family

__all__ = [
    "INTERPRETED",
    "AotCase",
    "Fixed",
    "Launch",
    "Rule",
    "Tile",
    "TileTable",
    "add_product",
    "dot",
    "family",
]
