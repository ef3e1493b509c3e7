"""Where offloaded activations wait: stores on disk and in the host's memory, and the figures of the way there."""

from recoup.torch.offload.copiers import CudaCopier, ThreadCopier
from recoup.torch.offload.disk import DiskStore
from recoup.torch.offload.host import Copier, HostStore
from recoup.torch.offload.measure import measure_disk, measure_host
from recoup.torch.offload.requests import Requests, SystemRequests
from recoup.torch.offload.store import Fetch, Store, Ticket

__all__ = [
    "Copier",
    "CudaCopier",
    "DiskStore",
    "Fetch",
    "HostStore",
    "Requests",
    "Store",
    "SystemRequests",
    "ThreadCopier",
    "Ticket",
    "measure_disk",
    "measure_host",
]
