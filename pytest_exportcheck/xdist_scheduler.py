"""A `loadscope` in which a test that kills its worker is lost once. Imports xdist."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadScopeScheduling

__all__ = ["OneLossLoadScope"]

#: A worker with fewer pending tests runs none of them.
_HELD = 2


class OneLossLoadScope(LoadScopeScheduling):  # type: ignore[misc]
    """xdist's `loadscope` that survives the death of workers. Three things of xdist 3.8 are put right:

    * `remove_node` reports the first pending test of the dead worker as crashed, and then hands out its whole
      scope again with that test still pending: the test kills one replacement after the other until
      ``--max-worker-restart`` (4 per worker) ends the run, and the tests after it never run. xdist's `load`
      takes the test off the queue, and so does this.
    * `_reschedule` gives work to a replacement that has not collected yet, a `KeyError` that ends the run,
      when two workers die shortly one after the other.
    * A worker keeps its last test until it has another or is told to end. A replacement that is given the one
      test that is left of a scope would wait for ever, as only a test that ends gives out more.
    """

    def remove_node(self, node: Any) -> Any:
        """Remove the worker; return the node id of the test it died in, ``None`` if it was idle."""
        for work_unit in self.assigned_work.get(node, {}).values():
            for nodeid, completed in work_unit.items():
                if not completed:
                    return self._lose(node, work_unit, nodeid)
        return super().remove_node(node)

    def _lose(self, node: Any, work_unit: dict[str, bool], nodeid: str) -> str:
        work_unit[nodeid] = True
        workload = self.assigned_work.pop(node)
        for scope, unit in workload.items():
            if not all(unit.values()):
                self.workqueue[scope] = unit
        if self.workqueue:
            for other in self.assigned_work:
                self._reschedule(other)
        return nodeid

    def _reschedule(self, node: Any) -> None:
        if node not in self.registered_collections:
            return
        super()._reschedule(node)
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < _HELD:
            super()._reschedule(node)
