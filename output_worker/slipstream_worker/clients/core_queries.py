"""Clients' questions to the core beside their streams: changes of adapters, and embeddings."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream_worker.clients.adapter_queries import AdapterQueries
from slipstream_worker.clients.embedding_queries import EmbeddingQueries


@dataclass(frozen=True, slots=True)
class CoreQueries:
    """The queries that the core has not answered."""

    adapters: AdapterQueries
    embeddings: EmbeddingQueries

    def attached(self) -> None:
        """Another attach to the core begins: ask again."""
        self.adapters.attached()
        self.embeddings.attached()

    def withdraw(self, client: bytes) -> None:
        """Drop the queries of a client whose session has ended."""
        self.adapters.withdraw(client)
        self.embeddings.withdraw(client)
