"""How fast a model call comes through: see `benchmarks/README.md`."""
