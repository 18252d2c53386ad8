"""The node server: one memory tier and one set of storage connections for all engines of a machine.

Owns nothing itself; :mod:`kvshelf.server.messages` describes the protocol. Everything here needs
the extra ``kvshelf[server]``, so other packages import it only where a server is configured.
"""
