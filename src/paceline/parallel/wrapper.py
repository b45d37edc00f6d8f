"""What both wrappers are to a program that had the bare module: the same names, the same state dict, the same attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from paceline.errors import UsageError

PREFIX = "module."


class Wrapper(nn.Module):
    """Holds `module` and stands in for it.

    Names of parameters, buffers and state-dict entries are the module's own, without a `module.` in front, so checkpoints pass
    freely between the wrapped and the bare module. What the wrapper has not itself is looked up in the module.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise UsageError(f"{type(self).__name__} was given a {type(module).__name__}; give it the nn.Module to train")
        self.module = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")  # not there yet while the wrapper is being unpickled
            if module is None:
                raise
            return getattr(module, name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's own state dict; not collective, so that one rank alone may save."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load what the bare module or either wrapper saved; keys may begin with the `module.` that torch's wrappers add."""
        return self.module.load_state_dict(self._own_keys(state_dict, ""), strict=strict, assign=assign)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the module's parameters by the names that its state dict has."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield the module's buffers by the names that its state dict has."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Where the wrapper is a part of another module, put back the prefix by which torch goes on to look for the entries."""
        own = self._own_keys({key: value for key, value in state_dict.items() if key.startswith(prefix)}, prefix)
        for key in [key for key in state_dict if key.startswith(prefix)]:
            del state_dict[key]
        state_dict.update({prefix + PREFIX + key.removeprefix(prefix): value for key, value in own.items()})
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _own_keys(self, state_dict: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
        """Return the entries under the names that the bare module has for them; a module may itself have a child `module`."""
        known = {prefix + key for key in self.module.state_dict()}
        renamed = {key: prefix + key.removeprefix(prefix + PREFIX) for key in state_dict if key.startswith(prefix + PREFIX)}
        renamed = {key: name for key, name in renamed.items() if key not in known and name in known}
        if not renamed:
            return state_dict
        copied = getattr(state_dict, "copy", lambda: dict(state_dict))()  # keeps the version metadata of a real state dict
        for key in state_dict:
            copied[renamed.get(key, key)] = copied.pop(key)
        return copied
