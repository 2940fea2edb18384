"""`from_pretrained` of a model that was saved converted: its mechanisms are put in before its weights are read.

Hugging Face builds a model from its config, then looks for a weight of each name: by then the mechanisms must stand in it.
`post_init` is where a model's building ends, and `from_pretrained` where its loading does. Both are extended once transformers
is imported, and do nothing more than before unless the model's config speaks of a conversion.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_MODULE = "transformers.modeling_utils"


def watch() -> None:
    """Extend Hugging Face's models: at once, if transformers has been imported, or else when it is."""
    if _MODULE in sys.modules:
        extend(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _Finder(_MODULE, extend))


def extend(module: Any) -> None:
    """`PreTrainedModel` of `transformers.modeling_utils`."""
    model_class = module.PreTrainedModel
    post_init = model_class.post_init
    from_pretrained = model_class.from_pretrained.__func__

    @wraps(post_init)
    def built(self: Any) -> None:
        post_init(self)
        if getattr(self.config, "subquad", None) is not None:
            from subquad.conversion.loading import restore

            restore(self)

    @wraps(from_pretrained)
    def loaded(cls: Any, path: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        model, info = from_pretrained(cls, path, *args, output_loading_info=True, **kwargs)
        if getattr(model.config, "subquad", None) is not None:
            from subquad.conversion.loading import finish

            finish(model, info, path)
        return (model, info) if output_loading_info else model

    model_class.post_init = built
    model_class.from_pretrained = classmethod(loaded)  # type: ignore[arg-type]


class _Finder(MetaPathFinder):
    """Finds one module as others would, sees to it that something is done when it is there, and stands aside."""

    def __init__(self, name: str, do: Callable[[ModuleType], None]) -> None:
        self.name, self.do = name, do

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.do)
        return spec


class _Loader(Loader):
    def __init__(self, inner: Loader, do: Callable[[ModuleType], None]) -> None:
        self.inner, self.do = inner, do

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.inner
        self.inner.exec_module(module)
        self.do(module)
