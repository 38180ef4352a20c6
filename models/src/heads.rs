//! Which heads a layer shares among all tokens, and how many of the others each token uses.

use crate::checkpoint::Config;
use crate::error::Result;

/// More layers, heads or experts in a layer, and channels of a head than any model has: enough for all, and few enough that lists of
/// them are small.
pub(crate) const MAX_LAYERS: usize = 1 << 10;
pub(crate) const MAX_HEADS: usize = 1 << 12;
pub(crate) const MAX_HEAD_DIM: usize = 1 << 12;
/// More channels or hidden units than any model has.
pub(crate) const MAX_WIDTH: usize = 1 << 20;
/// More tokens than any vocabulary has.
pub(crate) const MAX_VOCABULARY: usize = 1 << 24;
/// Tokens of a sequence, at most.
pub(crate) const MAX_LENGTH: usize = 1 << 24;

/// The head counts of one attention layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadCounts {
    /// All heads.
    pub num_heads: usize,
    /// Those that every token uses.
    pub num_shared_heads: usize,
    /// How many of the others a token uses. (Published configs call this `routed_head`.)
    pub top_k: usize,
}

impl HeadCounts {
    /// Every head on.
    pub fn dense(num_heads: usize) -> HeadCounts {
        HeadCounts { num_heads, num_shared_heads: num_heads, top_k: 0 }
    }

    /// The heads that compete for the `top_k` places.
    pub fn num_routed_heads(&self) -> usize {
        self.num_heads - self.num_shared_heads
    }

    /// Heads that a token uses.
    pub fn active(&self) -> usize {
        self.num_shared_heads + self.top_k
    }

    /// Checks that the counts make a router.
    ///
    /// # Errors
    /// What is wrong with them, as text for an error that names file and key.
    pub fn check(&self) -> std::result::Result<(), String> {
        let HeadCounts { num_heads, num_shared_heads: shared, top_k } = *self;
        if shared > num_heads {
            return Err(format!("{shared} shared heads of {num_heads} heads"));
        }
        if top_k > num_heads - shared {
            return Err(format!("{top_k} active routed heads, but {num_heads} - {shared} routed heads"));
        }
        if top_k == 0 && shared < num_heads {
            return Err(format!("no active routed head, so all {num_heads} heads must be shared, not {shared}"));
        }
        Ok(())
    }
}

/// Rows of the parts of the scores, in this order.
#[derive(Debug, Clone, Copy)]
pub struct Parts {
    /// The routed heads', where tokens choose any.
    pub routed: usize,
    /// Two, of the balance between the parts, where there are both.
    pub balance: usize,
    /// The shared heads', where there are at least two.
    pub shared: usize,
}

impl Parts {
    /// Those of such a router.
    pub fn of(counts: HeadCounts) -> Parts {
        let (shared, routes) = (counts.num_shared_heads, counts.top_k > 0);
        Parts {
            routed: if routes { counts.num_routed_heads() } else { 0 },
            balance: if routes && shared > 0 { 2 } else { 0 },
            shared: if shared > 1 { shared } else { 0 },
        }
    }
}

/// The heads of one layer: any set of them may be shared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadSet {
    counts: HeadCounts,
    /// Ascending.
    shared: Vec<usize>,
}

impl HeadSet {
    /// The first heads are the shared ones, as in the published models.
    pub fn first(counts: HeadCounts) -> HeadSet {
        HeadSet { counts, shared: (0..counts.num_shared_heads).collect() }
    }

    /// `shared` heads, ascending, of `num_heads`, and how many of the others a token uses.
    pub(crate) fn new(num_heads: usize, shared: Vec<usize>, top_k: usize) -> HeadSet {
        HeadSet { counts: HeadCounts { num_heads, num_shared_heads: shared.len(), top_k }, shared }
    }

    /// Head counts.
    pub fn counts(&self) -> HeadCounts {
        self.counts
    }

    /// The shared heads, ascending.
    pub fn shared(&self) -> &[usize] {
        &self.shared
    }

    /// The routed heads, ascending.
    pub fn routed(&self) -> Vec<usize> {
        (0..self.counts.num_heads).filter(|head| self.shared.binary_search(head).is_err()).collect()
    }

    /// The sets of the layers with `num_heads` heads each, from the key `shared_heads` (a list of heads a layer) and the
    /// number of active routed heads in `top_k_key` or `top_k`; `None` where the configuration has no such key.
    /// `shared_head` and `routed_head`, which they replace, may be there too.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for a list of another length, a head that does not exist or occurs twice, or too large a `top_k`.
    pub fn configured(config: &Config, num_heads: &[usize], top_k_key: &str) -> Result<Option<Vec<HeadSet>>> {
        const KEY: &str = "shared_heads";
        let Some(value) = config.value(KEY) else { return Ok(None) };
        config.know(&["shared_head", "routed_head"]);
        let lists: Option<Vec<Vec<usize>>> = serde_json::from_value(value.clone()).ok();
        let Some(lists) = lists.filter(|lists| lists.len() == num_heads.len()) else {
            let expected = format!("{} lists of heads, one a layer", num_heads.len());
            return Err(config.invalid(KEY, expected));
        };
        let key = if config.has(top_k_key) { top_k_key } else { "top_k" };
        let top_k = config.usize_or_list(key, num_heads.len())?;
        if key != "top_k" && config.has("top_k") && config.usize_or_list("top_k", num_heads.len())? != top_k {
            return Err(config.invalid("top_k", format!("what {key} is, or one of the two keys alone")));
        }
        let set = |(i, mut shared): (usize, Vec<usize>)| {
            let counts = HeadCounts { num_heads: num_heads[i], num_shared_heads: shared.len(), top_k: top_k[i] };
            shared.sort_unstable();
            if shared.windows(2).any(|pair| pair[0] == pair[1]) || shared.last().is_some_and(|&h| h >= num_heads[i]) {
                let expected = format!("different heads below {} in layer {i}", num_heads[i]);
                return Err(config.rejects(KEY, expected, format!("{shared:?}")));
            }
            counts
                .check()
                .map_err(|found| config.rejects(key, "counts that make a router", format!("layer {i}: {found}")))?;
            Ok(HeadSet { counts, shared })
        };
        lists.into_iter().enumerate().map(set).collect::<Result<_>>().map(Some)
    }
}
