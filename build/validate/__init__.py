"""Checks of a build on a machine without a GPU: stages in order, reported as a table, JSON and JUnit XML."""
