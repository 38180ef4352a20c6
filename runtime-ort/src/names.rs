//! Names in exported models: of inputs and outputs, as Optimum has them, and keys of the metadata.

/// A language model's tokens, (batch, sequence).
pub const INPUT_IDS: &str = "input_ids";
/// 0 at padding, 1 at tokens that are there.
pub const ATTENTION_MASK: &str = "attention_mask";
/// The tokens' positions, (batch, sequence).
pub const POSITION_IDS: &str = "position_ids";
/// Scores of classes, or of the next token.
pub const LOGITS: &str = "logits";
/// What the names of a cache's inputs begin with.
pub const PAST: &str = "past_key_values.";
/// What those of the outputs that follow them begin with.
pub const PRESENT: &str = "present.";

/// The key of the metadata that names the family.
pub const FAMILY: &str = "moh.family";
/// Of each layer, separated by commas: heads that every token uses.
pub const NUM_SHARED_HEADS: &str = "moh.num_shared_heads";
/// Of each layer: how many of the others a token uses.
pub const TOP_K: &str = "moh.top_k";
/// How the cache grows.
pub const CACHE: &str = "moh.cache";
/// The value of [`CACHE`] for one with room for more tokens than there are, updated in place.
pub const IN_PLACE: &str = "in-place";
