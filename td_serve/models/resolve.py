"""What a user wrote as a model's name, turned into what vLLM and transformers load."""

import os
import re
from pathlib import Path

from td_serve.errors import ModelError, ModelNotFetched
from td_serve.models.cache import is_model, model_dir
from td_serve.models.catalog import CATALOG, suggest

# A hub's `organisation/name`. Both parts begin with a letter or digit, so that no path which says
# that it is one (`./x`, `../x`, `~/x`, `/x`) looks like it.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve(name: str) -> str:
    """The directory or hub id that `name` stands for.

    In this order: a name of the catalogue gives its directory in the cache; an existing directory
    that holds a model gives itself, as an absolute path; `organisation/name` is returned unchanged,
    for the hub.

    Raises:
        ModelNotFetched: `name` is in the catalogue and not in the cache.
        ModelError: `name` is none of these.
    """
    if name in CATALOG:
        path = model_dir(name)
        if not is_model(path):
            raise ModelNotFetched(
                f"model {name} is not in the cache ({path}); run: td-serve model fetch {name}"
            )
        return str(path)
    # os.path answers for whatever a user may type; Path's methods raise for some of it.
    path = Path(os.path.expanduser(name))  # noqa: PTH111
    if name and os.path.isdir(path):  # noqa: PTH112
        if not is_model(path):
            raise ModelError(f"model directory {name!r} has no config.json")
        return str(path.absolute())
    if _HUB_ID.fullmatch(name):
        return name
    raise ModelError(
        f"model {name!r} is neither in the catalogue, nor a directory with a config.json, nor a"
        f" hub id (organisation/name); {suggest(name)}"
    )
