"""What only a GPU can show; run by `make gpu`, on a machine that needs no network and no vLLM."""
