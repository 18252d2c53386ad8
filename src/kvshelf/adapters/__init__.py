"""A node server's clients for engines that bring their own connector.

Adapters between an engine and the node server of its machine, with the contract of vLLM's adapters
for LMCache's server: one for the engine's scheduler, one for each worker. They are built on
:mod:`kvshelf.server.interface` and import vLLM nowhere; where an engine's configuration is all that
a caller has, they ask :mod:`kvshelf.vllm.engine_facts`. ``README.md`` compares them with
vLLM's, row by row. Callers import them from :mod:`kvshelf.server.client`, or under vLLM's names and
signatures from :mod:`kvshelf.vllm.multiprocess`.
"""
