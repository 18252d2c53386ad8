"""The layout of KV in memory, and the copies between its forms. Independent of storage."""
