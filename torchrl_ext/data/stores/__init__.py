"""Bytes by key, durably: stores in directories and buckets, versions and manifests in them, files of tensors."""
