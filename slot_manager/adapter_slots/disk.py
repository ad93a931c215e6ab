"""DISK: bundles in directories, named by the registry; opened, checked against the engine, and verified once."""

from __future__ import annotations

from adapter_slots.errors import AdapterRejected, BundleBroken
from adapter_slots.registry import Entry
from trtllm_lora import Bundle, BundleError, CacheGeometry, open_bundle
from trtllm_lora.fit import fit_problems


class DiskTier:
    """Opens the bundles of registry entries for one engine."""

    def __init__(self, geometry: CacheGeometry) -> None:
        self.geometry = geometry
        self._verified: set[str] = set()

    def open(self, entry: Entry) -> Bundle:
        """The bundle of an entry, known to fit the engine.

        Raises:
            AdapterRejected: no such bundle, another digest than the registry's, or it does not fit: every reason.
        """
        try:
            bundle = open_bundle(entry.path)
            problems = fit_problems(bundle, self.geometry.shape)
        except BundleError as error:
            raise AdapterRejected(f"adapter {entry.name!r}: {error}", adapter=entry.name) from None
        if bundle.digest != entry.digest:
            problems.insert(0, f"the registry says digest {entry.digest[:12]}, the bundle is {bundle.digest[:12]}")
        if problems:
            raise AdapterRejected(f"adapter {entry.name!r}: " + "; ".join(problems), adapter=entry.name)
        return bundle

    def pages(self, bundle: Bundle) -> int:
        """Pages the bundle takes in the engine's LoRA cache, on the rank where it takes most."""
        return self.geometry.max_pages_for(bundle.config()[0].tolist())

    def verify(self, bundle: Bundle) -> None:
        """Check every byte against the manifest, once per digest.

        Raises:
            BundleBroken: some file is not what the manifest says.
        """
        if bundle.digest in self._verified:
            return
        try:
            bundle.verify()
        except BundleError as error:
            raise BundleBroken(str(error)) from None
        self._verified.add(bundle.digest)
