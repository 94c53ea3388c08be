"""Pictures, tables and the report's page, from files: of runs, evaluations, traces and timings."""
