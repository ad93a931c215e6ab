"""Worlds and clocks the pure parts are tested in."""
