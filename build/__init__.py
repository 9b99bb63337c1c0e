"""Configs, networks and engines: from a converted checkpoint to an engine directory."""
