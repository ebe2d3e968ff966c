"""The version of the backend contract, and how versions compare.

The contract's version is not the package's: a release that changes no clause keeps it. A backend
declares the version it was written against in `LoRABackend.contract`. Checks of the conformance
suite carry the version that introduced them; for a backend of an older version, newer checks run
as previews that cannot fail. The clauses themselves are numbered in docs/contract.md.
"""

from __future__ import annotations

from lora_core.errors import ContractError

CONTRACT_VERSION = "1.0"


def parse_version(version: str) -> tuple[int, int]:
    """`"1.0"` -> `(1, 0)`.

    Raises:
        ContractError: not of the form MAJOR.MINOR.
    """
    major, dot, minor = version.partition(".")
    if not (dot and major.isdigit() and minor.isdigit()):
        raise ContractError(
            f"contract version {version!r} is not of the form 'MAJOR.MINOR', such as {CONTRACT_VERSION!r}"
        )
    return int(major), int(minor)


def check_supported(owner: str, version: str) -> None:
    """Refuse a backend written against a contract that this lora_core does not know.

    Raises:
        ContractError: another major version, or a newer minor version.
    """
    asked, known = parse_version(version), parse_version(CONTRACT_VERSION)
    if asked[0] != known[0] or asked > known:
        raise ContractError(
            f"{owner} declares contract {version}, but this lora_core implements "
            f"{CONTRACT_VERSION}; it accepts {known[0]}.0 to {CONTRACT_VERSION}. "
            + ("Upgrade lora-core." if asked > known else "Upgrade the plugin.")
        )
