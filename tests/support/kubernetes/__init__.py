"""A Kubernetes in one process: the API by kmock with what it lacks (`api`), nodes that really start what pods ask for (`nodes`)."""

from .site import KubernetesSite

__all__ = ["KubernetesSite"]
