"""The parts that model files are made of."""
