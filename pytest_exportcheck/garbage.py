"""The search for garbage while specs run: what stays anyway is set aside, and not looked at again.

torch, transformers and onnxscript are over a million objects that live as long as the process. An export
makes enough new ones for Python to look at all of them every few seconds, which was a sixth of the CPU time
of a run. What is set aside is not looked at, and nothing in it is freed but by its count of references until
it is brought back: so it is brought back before a spec is let go of.
"""

from __future__ import annotations

import gc
import sys

__all__ = ["Garbage"]

#: With fewer modules loaded since, setting aside costs more than it saves.
_MANY_MODULES = 100


class Garbage:
    """What a process that runs specs does about garbage.

    Nothing but to look for it after each spec, where the collector is switched off, or where somebody else
    has set objects aside: there is no telling theirs from ours.
    """

    def __init__(self) -> None:
        self._modules = 0
        #: Objects of a spec that is still in memory are among those set aside.
        self._has_live_spec = False
        self._is_frozen = False

    def after_case(self) -> None:
        """Set aside what is there, if much was imported since the last time: the spec goes on."""
        # The count of what others have set aside goes through all of it: asked last.
        if len(sys.modules) - self._modules >= _MANY_MODULES and self._may_set_aside():
            gc.collect()
            self._set_aside()
            self._has_live_spec = True

    def after_spec(self) -> None:
        """Free what the spec that ended left in cycles, before the next one is loaded."""
        if self._has_live_spec:
            gc.unfreeze()
            self._has_live_spec = self._is_frozen = False
        gc.collect()
        if self._may_set_aside():
            self._set_aside()

    def bring_back(self) -> None:
        """Leave the collector as it was found: for the tests of others, and at the end."""
        if self._is_frozen:
            gc.unfreeze()
            self._is_frozen = self._has_live_spec = False
            self._modules = 0

    def _may_set_aside(self) -> bool:
        return gc.isenabled() and (self._is_frozen or not gc.get_freeze_count())

    def _set_aside(self) -> None:
        gc.freeze()
        self._is_frozen, self._modules = True, len(sys.modules)
