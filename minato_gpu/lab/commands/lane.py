"""``minato-gpu lane``: this machine's cores, for loaders of other machines."""

from __future__ import annotations

import sys

import click

from minato_gpu.lab.commands.common import plain_errors


@click.command(short_help="Prepare samples here for loaders of other machines.")
@click.option("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="Where loaders connect; port 0: any.")
@click.option("--cores", type=click.IntRange(min=0), default=0, help="Workers for each loader; 0: one a core.")
@click.option("--tied", is_flag=True, help="End when standard input is closed: with whatever has started it.")
@click.pass_context
def lane(context: click.Context, listen: str, cores: int, tied: bool) -> None:
    """Prepare samples here for DataLoader(cluster=minato_gpu.Lanes("host:port")) of other machines.

    Runs until it is ended. Both sides need the same secret in the environment variable MINATO_GPU_TOKEN. Whoever knows
    it can run code here as you: keep the port in a network that you trust, since nothing is encrypted.
    """
    from minato_gpu.lanes.far.agent import serve

    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit():
        raise click.BadParameter(f"{listen!r} is no HOST:PORT", param_hint="--listen")
    with plain_errors(context):
        serve(host.strip("[]"), int(port), cores, _listening, tied=tied)


def _listening(address: str) -> None:
    click.echo(f"listening on {address}")
    sys.stdout.flush()
