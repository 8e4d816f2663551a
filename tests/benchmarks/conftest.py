"""The fake worker of the API's tests, for the benchmarks' clients."""

from tests.api.conftest import address as address
from tests.api.conftest import worker as worker
