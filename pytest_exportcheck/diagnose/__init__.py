"""After a failure: which stage, which node, which module, and what is known about it."""
