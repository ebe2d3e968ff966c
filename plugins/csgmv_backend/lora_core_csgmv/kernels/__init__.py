"""One file per kernel. Both walk the segments of one block (`lora_core_csgmv.segments`)."""
