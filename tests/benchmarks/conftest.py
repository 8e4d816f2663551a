"""A worker that tests play, for the benchmarks' clients too."""

from tests.api.conftest import address as address
from tests.api.conftest import worker as worker
