"""`unbroken` as on a cluster whose nodes may be other machines: agents come over TLS, here over the loopback."""

from __future__ import annotations

from unbroken.cluster.local_events import LocalCluster
from unbroken.recover.supervise import supervisor

LocalCluster.socket_folder = property(lambda self: None)  # type: ignore[assignment, misc]
supervisor.own_address = lambda: "127.0.0.1"  # type: ignore[attr-defined]

if __name__ == "__main__":
    from unbroken.cli.main import main

    main()
