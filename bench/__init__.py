"""What the outbox costs, measured as ratios within one run: `python -m bench --help`.

Each bench is a module with `run(server, sizes) -> Section`:

    claim.py      100 rows out of a large backlog, against the same claim on a small one and the textbook query
    settle.py     results in batches, against row by row
    memory.py     the peak of a drain's process with a large backlog, against a small one

They run the outbox's own code on a server of their own (`database.py`); `report.py` prints and writes the figures.
"""
