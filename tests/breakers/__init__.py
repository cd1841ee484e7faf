"""Faults that breakers found."""
