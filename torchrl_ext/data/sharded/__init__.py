"""From the shards of trainer ranks to the slices of engine workers, without a gather and without a full tensor."""
