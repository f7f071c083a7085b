"""Data only: one TOML file per family of devices. Read by :mod:`memfit.devices.shelf`."""
