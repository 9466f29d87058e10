"""The app on one machine, on real parts: `python3 -m localdev --help`. Nothing in outbox/ imports it.

- `bootstrap`: the virtual environment and what goes into it (standard library only)
- `stack`: everything together, as a context manager; `up`, the demo and the acceptance tests use it
- `postgres`, `azurite`, `receiver`, `host/`: the parts
- `processes`, `guard`, `console`, `filelock`, `settings`: what holds the parts together
- `order`, `demo`, `checks`: the commands
"""
