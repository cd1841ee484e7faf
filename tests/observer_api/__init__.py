"""The public observer: `InputObserver` and what is imported beside it."""
