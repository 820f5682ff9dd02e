"""Espalier: write the model for one device; it is laid on a mesh of devices and trained there.

What the package holds is imported when the first of its names is used: that takes seconds, for which
``espalier --help`` need not wait.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from espalier.api import *  # noqa: F403
else:  # a type checker would take it that every name is there

    def __getattr__(name: str) -> Any:
        from importlib import import_module

        from espalier.later import importing

        if not name.startswith("__") or name == "__all__":
            with importing():
                api = import_module("espalier.api")
            globals().update({key: getattr(api, key) for key in ("__all__", *api.__all__)})
            if name in globals():
                return globals()[name]
        if name in ("einsum", "tensordot", "transpose"):  # see there who looks for them here
            return getattr(import_module("espalier.tensor.arrays"), name)
        # with what it was asked of Python says which of the names was meant
        said = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(said, name=name, obj=import_module(__name__))

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
