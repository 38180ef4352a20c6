//! Shares of the heads as numbers of heads.

use super::RouterKind;
use crate::error::Error;
use moh_models::router::HeadCounts;
use serde_json::Value;

/// Shares of a layer's heads, each from 0 to 1. A number of heads is the share of all heads, rounded down, as in a configuration's
/// `moh_shared_fraction`; but where not all heads are shared, at least one is routed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shares {
    /// Those that every token uses.
    pub shared: f64,
    /// Those that a token uses, the shared ones among them.
    pub active: f64,
}

impl Default for Shares {
    /// Those of MoH-LLaMA3-8B.
    fn default() -> Shares {
        Shares { shared: 0.5, active: 0.75 }
    }
}

/// The heads of every layer.
pub(super) struct Heads {
    pub(super) counts: HeadCounts,
}

impl Heads {
    /// # Errors
    /// [`Error::Share`].
    pub(super) fn choose(num_heads: usize, shares: Shares) -> Result<Heads, Error> {
        let Shares { shared, active } = shares;
        let wrong = |which, expected: String, found| Err(Error::Share { which, expected, found });
        if !(0.0..=1.0).contains(&shared) {
            return wrong("shared", "a number from 0 to 1".to_owned(), shared);
        }
        let fits = if shared < 1.0 { active > shared && active <= 1.0 } else { active == 1.0 };
        if !fits {
            let expected = match shared < 1.0 {
                true => format!("more than the shared ones, {shared}, and up to 1"),
                false => "1, as all heads are shared".to_owned(),
            };
            return wrong("active", expected, active);
        }
        // What is a whole number but for the rounding of a product counts as one.
        let rounded = |share: f64| (num_heads as f64 * share + 1e-9) as usize;
        // Shares just below 1 are less than all heads.
        let num_shared_heads = if shared < 1.0 { rounded(shared).min(num_heads - 1) } else { num_heads };
        let top_k = match num_heads - num_shared_heads {
            0 => 0,
            routed => rounded(active).saturating_sub(num_shared_heads).clamp(1, routed),
        };
        Ok(Heads { counts: HeadCounts { num_heads, num_shared_heads, top_k } })
    }

    /// What a configuration says of them.
    pub(super) fn keys(&self, router: RouterKind) -> Vec<(&'static str, Value)> {
        let HeadCounts { num_heads, num_shared_heads, top_k } = self.counts;
        match router {
            RouterKind::QueryNorm => vec![
                ("moh_shared_fraction", fraction(num_shared_heads, num_heads).into()),
                ("moh_routed_fraction", fraction(top_k, num_heads).into()),
            ],
            RouterKind::TwoStage => vec![("shared_head", num_shared_heads.into()), ("routed_head", top_k.into())],
        }
    }
}

/// A fraction that gives `count` where its product with `all` is rounded down.
fn fraction(count: usize, all: usize) -> f64 {
    let fraction = count as f64 / all as f64;
    if ((all as f64 * fraction) as usize) < count { fraction.next_up() } else { fraction }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn numbers_of_heads() {
        let chosen = |all, shared, active| {
            let HeadCounts { num_shared_heads, top_k, .. } =
                Heads::choose(all, Shares { shared, active }).unwrap().counts;
            (num_shared_heads, top_k)
        };
        assert_eq!(chosen(32, 0.5, 0.75), (16, 8));
        assert_eq!(chosen(7, 0.5, 0.75), (3, 2));
        // 100 * 0.29 is less than 29 in f64.
        assert_eq!(chosen(100, 0.29, 0.57), (29, 28));
        assert_eq!((chosen(4, 0.5, 0.6), chosen(4, 0.0, 0.1), chosen(1, 0.5, 0.6)), ((2, 1), (0, 1), (0, 1)));
        assert_eq!((chosen(8, 1.0, 1.0), chosen(8, 0.5, 1.0), chosen(8, 1.0 - 1e-12, 1.0)), ((8, 0), (4, 4), (7, 1)));
    }

    #[test]
    fn shares_that_make_no_router() {
        let text = |shared, active| Heads::choose(8, Shares { shared, active }).err().unwrap().to_string();
        let number = "share of shared heads: expected a number from 0 to 1, found ";
        assert_eq!(text(1.5, 1.0), format!("{number}1.5"));
        assert_eq!(text(f64::NAN, 1.0), format!("{number}NaN"));
        let more = "share of active heads: expected more than the shared ones, 0.5, and up to 1, found ";
        for active in [0.5, 0.25, 1.25, f64::NAN] {
            assert_eq!(text(0.5, active), format!("{more}{active}"));
        }
        assert_eq!(text(1.0, 0.5), "share of active heads: expected 1, as all heads are shared, found 0.5");
    }

    /// As `models` reads them.
    #[test]
    fn fractions_give_their_numbers_back() {
        for all in 1..=512 {
            for count in 0..=all {
                assert_eq!((all as f64 * fraction(count, all)) as usize, count, "{count} of {all}");
            }
        }
    }
}
