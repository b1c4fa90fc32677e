"""Layers that torch computes on a device."""
