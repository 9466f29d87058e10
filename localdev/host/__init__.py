"""A stand-in for the Azure Functions host (Core Tools' `func start`), for machines without it.

`python -m localdev.host` reads the trigger metadata of `function_app.app`, host.json and the settings as the host does.

- `configuration`: host.json; `functions`: the app's triggers and bindings
- `worker`: running a function as the Python worker does
- `http_trigger` (with `routes`), `queue_trigger`, `timer_trigger` (with `ncrontab`): what makes functions run
"""
