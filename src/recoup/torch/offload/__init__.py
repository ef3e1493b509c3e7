"""Where offloaded activations wait: stores on disk and in the host's memory, and the figures of the way there."""

from recoup.torch.offload.disk import DiskStore
from recoup.torch.offload.requests import Requests, SystemRequests
from recoup.torch.offload.store import Fetch, Store, Ticket

__all__ = ["DiskStore", "Fetch", "Requests", "Store", "SystemRequests", "Ticket"]
