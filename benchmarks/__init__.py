"""One command each: `python -m benchmarks.NAME [--quick] [--json FILE]` prints a table and writes its figures.

The figures are a JSON list of `{"measure", "case", "subject", "value", "unit"}`; `benchmarks.report` writes it.
"""
