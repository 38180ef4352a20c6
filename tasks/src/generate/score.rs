//! How probable tokens are by a model.

/// A token, and how probable it was.
#[derive(Debug, Clone, PartialEq)]
pub struct Score {
    /// The token.
    pub token: i64,
    /// The natural logarithm of its probability, among all tokens and before any sampling option.
    pub logprob: f32,
    /// The most probable tokens with theirs, the most probable first and the lowest id first among equals.
    pub top: Vec<(i64, f32)>,
}

impl Score {
    /// That of `token` by the logits of its place, with the `count` most probable tokens; `None` where it is no token, or a logit is not
    /// a number or infinite.
    pub fn new(logits: &[f32], token: i64, count: usize) -> Option<Score> {
        let own = *logits.get(usize::try_from(token).ok()?)?;
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        // Masked tokens are at minus infinity.
        if !most.is_finite() || logits.iter().any(|logit| logit.is_nan()) {
            return None;
        }
        let total: f64 = logits.iter().map(|logit| f64::from((logit - most).exp())).sum();
        let logprob = |logit: f32| (f64::from(logit - most) - total.ln()) as f32;
        let top = greatest(logits, count).into_iter().map(|(token, logit)| (token, logprob(logit))).collect();
        Some(Score { token, logprob: logprob(own), top })
    }
}

/// The `count` greatest logits with their tokens.
fn greatest(logits: &[f32], count: usize) -> Vec<(i64, f32)> {
    // `count` is small, and most logits are less than all that were kept.
    let mut kept: Vec<(i64, f32)> = Vec::with_capacity(count + 1);
    for (token, &logit) in (0..).zip(logits) {
        if kept.len() == count && kept.last().is_none_or(|last| logit <= last.1) {
            continue;
        }
        let at = kept.partition_point(|other| other.1 >= logit);
        kept.insert(at, (token, logit));
        kept.truncate(count);
    }
    kept
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn probabilities_are_those_of_all_tokens() {
        let logits = [0.1f32, 0.4, 0.2, 0.3].map(|p| p.ln() + 7.0);
        let score = Score::new(&logits, 2, 2).unwrap();
        let near = |logprob: f32, p: f32| (logprob - p.ln()).abs() < 1e-6;
        assert!(near(score.logprob, 0.2), "{score:?}");
        assert!(matches!(score.top[..], [(1, a), (3, b)] if near(a, 0.4) && near(b, 0.3)), "{score:?}");
        assert_eq!(Score::new(&logits, 0, 9).unwrap().top.iter().map(|top| top.0).collect::<Vec<_>>(), [1, 3, 2, 0]);
        assert_eq!(Score::new(&logits, 0, 0).unwrap().top, []);
        // A masked token, and logits far apart.
        let score = Score::new(&[-1e30, f32::NEG_INFINITY, 1e30], 1, 1).unwrap();
        assert_eq!(score, Score { token: 1, logprob: f32::NEG_INFINITY, top: vec![(2, 0.0)] });
    }

    #[test]
    fn the_lowest_tokens_among_equals_come_first() {
        let top = |logits: &[f32], count| Score::new(logits, 0, count).unwrap().top.into_iter().map(|top| top.0);
        assert!(top(&[1.0, 3.0, 3.0, 2.0, 3.0], 2).eq([1, 2]));
        assert!(top(&[0.0; 5], 3).eq([0, 1, 2]));
        assert!(top(&[-0.0, 0.0, -0.0], 2).eq([0, 1]));
    }

    #[test]
    fn what_has_no_probability_has_no_score() {
        assert_eq!(Score::new(&[1.0, f32::NAN], 0, 1), None);
        assert_eq!(Score::new(&[1.0, f32::INFINITY], 0, 1), None);
        assert_eq!(Score::new(&[f32::NEG_INFINITY; 2], 0, 1), None);
        assert_eq!(Score::new(&[1.0], 1, 1), None);
        assert_eq!(Score::new(&[1.0], -1, 1), None);
    }
}
