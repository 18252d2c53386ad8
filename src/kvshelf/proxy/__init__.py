"""``kvshelf proxy``: an HTTP proxy between OpenAI clients and engines that share one shelf.

A request is sent to a *prefill engine* first, which stores the prompt's KV and answers with params
(:mod:`kvshelf.vllm.handover`); then, with these params, to a *decode engine*, whose answer the
client gets. It is a reference: it balances by the number of requests in flight and knows nothing of
prefixes. Needs the extra ``kvshelf[proxy]``; imports neither torch nor vLLM.

Threads
-------
Everything runs on the event loop of one thread. Only :mod:`kvshelf.proxy.durable` looks at storage,
on threads.
"""
