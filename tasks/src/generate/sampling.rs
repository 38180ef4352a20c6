//! Which token comes next: the most probable, or one drawn at random.

use crate::error::{Error, Result};
use crate::random::Random;
use std::cmp::Ordering;

/// How tokens are drawn. The filters apply in this order: `top_k`, then `top_p` of what is left.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// Divides the logits: below 1 favours probable tokens, above 1 flattens the distribution. Positive.
    pub temperature: f64,
    /// Sample from this many of the most probable tokens; `None`: all.
    pub top_k: Option<usize>,
    /// Sample from the most probable tokens whose probabilities add up to this, 0 to 1; 1 is all.
    pub top_p: f64,
    /// Seed; the same seed gives the same tokens.
    pub seed: u64,
}

impl Sampling {
    /// The first option out of its range.
    fn problem(&self) -> Option<String> {
        if !(self.temperature > 0.0 && self.temperature.is_finite()) {
            return Some(format!("temperature: expected a positive number, found {}", self.temperature));
        }
        if !(0.0..=1.0).contains(&self.top_p) {
            return Some(format!("top_p: expected 0 to 1, found {}", self.top_p));
        }
        (self.top_k == Some(0)).then(|| "top_k: expected at least 1, found 0".to_owned())
    }

    /// A token; `None` where no logit is a number. At least the most probable one can be drawn, whatever the filters.
    fn draw(&self, logits: &[f32], random: &mut Random) -> Option<i64> {
        let most = greatest(logits);
        if most.is_infinite() {
            return most_probable(logits);
        }
        let mut tokens: Vec<Weighed> = (0..)
            .zip(logits)
            .filter(|(_, logit)| !logit.is_nan())
            .map(|(token, &logit)| Weighed { token, logit, weight: 0.0 })
            .collect();
        if let Some(k) = self.top_k.filter(|&k| k < tokens.len()) {
            tokens.select_nth_unstable_by(k - 1, Weighed::by_probability);
            tokens.truncate(k);
            // Selecting leaves them in an order that depends on tokens which are gone.
            tokens.sort_unstable_by_key(|token| token.token);
        }
        for token in &mut tokens {
            token.weight = ((f64::from(token.logit - most) / self.temperature) as f32).exp();
        }
        let total = |tokens: &[Weighed]| tokens.iter().map(|token| f64::from(token.weight)).sum::<f64>();
        if self.top_p < 1.0 {
            let weight = self.top_p * total(&tokens);
            let kept = most_probable_first(&mut tokens, weight);
            tokens.truncate(kept.max(1));
        }
        let mut left = random.uniform() * total(&tokens);
        let drawn = tokens.iter().find(|token| {
            left -= f64::from(token.weight);
            left < 0.0
        });
        // Where rounding leaves a rest.
        drawn.or(tokens.iter().max_by(|a, b| Weighed::by_probability(b, a))).map(|drawn| drawn.token)
    }
}

/// A token that may be drawn.
#[derive(Debug, Clone, Copy)]
struct Weighed {
    token: i64,
    logit: f32,
    weight: f32,
}

impl Weighed {
    /// The most probable first, and the lowest among equals.
    fn by_probability(a: &Weighed, b: &Weighed) -> Ordering {
        b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token))
    }
}

/// Puts the most probable tokens first, as many as have `weight` together; gives their number. The others are in no order.
fn most_probable_first(tokens: &mut [Weighed], weight: f64) -> usize {
    let (mut sorted, mut before, mut part) = (0, 0.0, 64);
    while sorted < tokens.len() {
        let rest = &mut tokens[sorted..];
        if part < rest.len() {
            rest.select_nth_unstable_by(part - 1, Weighed::by_probability);
        }
        let next = rest.len().min(part);
        rest[..next].sort_unstable_by(Weighed::by_probability);
        for (i, token) in rest[..next].iter().enumerate() {
            if before >= weight {
                return sorted + i;
            }
            before += f64::from(token.weight);
        }
        (sorted, part) = (sorted + next, part * 8);
    }
    tokens.len()
}

/// Chooses the tokens of one sequence.
#[derive(Debug, Clone)]
pub struct Chooser {
    sampling: Option<Sampling>,
    random: Random,
}

impl Chooser {
    /// Draws tokens, or takes the most probable one each time, the lowest id among equals. Sequences with different numbers of a `stream`
    /// draw independently of each other.
    ///
    /// # Errors
    /// [`Error::Setting`] for sampling options out of range.
    pub fn new(sampling: Option<Sampling>, stream: u64) -> Result<Chooser> {
        match sampling.as_ref().and_then(Sampling::problem) {
            Some(problem) => Err(Error::Setting(problem)),
            None => Ok(Chooser { random: Random::new(sampling.as_ref().map_or(0, |s| s.seed), stream), sampling }),
        }
    }

    /// The next token; `None` where no logit is a number.
    pub fn choose(&mut self, logits: &[f32]) -> Option<i64> {
        match &self.sampling {
            Some(sampling) => sampling.draw(logits, &mut self.random),
            None => most_probable(logits),
        }
    }
}

/// The greatest logit's token, the lowest among equals; `None` where no logit is a number.
fn most_probable(logits: &[f32]) -> Option<i64> {
    let most = greatest(logits);
    (0..).zip(logits).find(|(_, logit)| **logit == most).map(|(token, _)| token)
}

/// The greatest number; minus infinity where there is none.
fn greatest(logits: &[f32]) -> f32 {
    /// Maxima side by side, which compilers turn into vectors.
    const LANES: usize = 32;
    let greater = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let mut chunks = logits.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (lane, &logit) in lanes.iter_mut().zip(chunk) {
            *lane = greater(*lane, logit);
        }
    }
    lanes.into_iter().chain(chunks.remainder().iter().copied()).fold(f32::NEG_INFINITY, greater)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_token_among_equals_is_taken_and_nan_never() {
        assert_eq!(most_probable(&[1.0, 3.0, 3.0, 2.0]), Some(1));
        assert_eq!(most_probable(&[f32::NAN, -1.0, f32::NAN, -0.5]), Some(3));
        assert_eq!(most_probable(&[f32::NEG_INFINITY, f32::NEG_INFINITY]), Some(0));
        assert_eq!(most_probable(&[f32::NAN]), None);
        assert_eq!(most_probable(&[]), None);
    }

    /// Shares of the tokens in many draws.
    fn shares(logits: &[f32], sampling: &Sampling) -> Vec<f64> {
        const DRAWS: usize = 20_000;
        let mut random = Random::new(sampling.seed, 0);
        let mut counts = vec![0.0; logits.len()];
        for _ in 0..DRAWS {
            if let Some(token) = sampling.draw(logits, &mut random) {
                counts[token as usize] += 1.0 / DRAWS as f64;
            }
        }
        counts
    }

    fn plain() -> Sampling {
        Sampling { temperature: 1.0, top_k: None, top_p: 1.0, seed: 3 }
    }

    fn near(found: &[f64], expected: &[f64]) {
        let close = found.iter().zip(expected).all(|(a, b)| if *b == 0.0 { *a == 0.0 } else { (a - b).abs() < 0.015 });
        assert!(close && found.len() == expected.len(), "{found:?}, expected {expected:?}");
    }

    const PROBABILITIES: [f32; 4] = [0.1, 0.4, 0.2, 0.3];

    #[test]
    fn tokens_are_drawn_by_their_probability() {
        near(&shares(&PROBABILITIES.map(f32::ln), &plain()), &[0.1, 0.4, 0.2, 0.3]);
        near(
            &shares(&PROBABILITIES.map(f32::ln), &Sampling { temperature: 0.5, ..plain() }),
            &[1.0 / 30.0, 16.0 / 30.0, 4.0 / 30.0, 9.0 / 30.0],
        );
        near(&shares(&PROBABILITIES.map(f32::ln), &Sampling { temperature: 1e-3, ..plain() }), &[0.0, 1.0, 0.0, 0.0]);
    }

    #[test]
    fn filters_keep_the_most_probable() {
        near(
            &shares(&PROBABILITIES.map(f32::ln), &Sampling { top_k: Some(2), ..plain() }),
            &[0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0],
        );
        near(&shares(&PROBABILITIES.map(f32::ln), &Sampling { top_k: Some(9), ..plain() }), &[0.1, 0.4, 0.2, 0.3]);
        near(
            &shares(&PROBABILITIES.map(f32::ln), &Sampling { top_p: 0.5, ..plain() }),
            &[0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0],
        );
        near(
            &shares(&PROBABILITIES.map(f32::ln), &Sampling { top_p: 0.75, ..plain() }),
            &[0.0, 4.0 / 9.0, 2.0 / 9.0, 3.0 / 9.0],
        );
        near(&shares(&PROBABILITIES.map(f32::ln), &Sampling { top_p: 0.0, ..plain() }), &[0.0, 1.0, 0.0, 0.0]);
        // 0.6 of what top_k leaves, 4/7 and 3/7.
        near(
            &shares(&PROBABILITIES.map(f32::ln), &Sampling { top_k: Some(2), top_p: 0.6, ..plain() }),
            &[0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0],
        );
        near(
            &shares(&PROBABILITIES.map(f32::ln), &Sampling { top_k: Some(2), top_p: 0.5, ..plain() }),
            &[0.0, 1.0, 0.0, 0.0],
        );
    }

    #[test]
    fn of_equals_the_first_are_kept() {
        near(&shares(&[0.0; 3], &Sampling { top_k: Some(2), ..plain() }), &[0.5, 0.5, 0.0]);
        near(&shares(&[0.0; 4], &Sampling { top_p: 0.5, ..plain() }), &[0.5, 0.5, 0.0, 0.0]);
    }

    /// The probabilities that top_p adds up are those at the temperature.
    #[test]
    fn filters_apply_at_the_temperature() {
        // 1/30, 16/30, 4/30 and 9/30.
        let cold = Sampling { temperature: 0.5, ..plain() };
        near(
            &shares(&PROBABILITIES.map(f32::ln), &Sampling { top_p: 0.75, ..cold.clone() }),
            &[0.0, 16.0 / 25.0, 0.0, 9.0 / 25.0],
        );
        near(
            &shares(&PROBABILITIES.map(f32::ln), &Sampling { top_k: Some(3), top_p: 0.9, ..cold }),
            &[0.0, 16.0 / 29.0, 4.0 / 29.0, 9.0 / 29.0],
        );
        // Nearly equal ones: three of them are above two thirds, and above 0.7 no two are.
        let warm = Sampling { temperature: 100.0, top_p: 0.7, ..plain() };
        near(&shares(&PROBABILITIES.map(f32::ln), &warm), &[0.0, 0.336, 0.331, 0.334]);
    }

    /// As it would be where sums of less probable tokens were added in another order.
    #[test]
    fn tokens_that_are_filtered_out_change_no_draw() {
        let mut logits: Vec<f32> = (0..999u32).map(|i| (i * 7919 % 999) as f32 / 100.0).collect();
        let draws = |logits: &[f32]| -> Vec<Option<i64>> {
            let mut random = Random::new(1, 0);
            (0..99).map(|_| Sampling { top_k: Some(20), ..plain() }.draw(logits, &mut random)).collect()
        };
        let before = draws(&logits);
        logits.iter_mut().filter(|logit| **logit < 9.0).for_each(|logit| *logit = -*logit);
        assert_eq!(draws(&logits), before);
    }

    /// More tokens than are sorted at a time.
    #[test]
    fn a_large_vocabulary_is_cut_where_a_small_one_would_be() {
        let logits: Vec<f32> = (0..5000u32).map(|i| (i * 7919 % 5000) as f32 / 1000.0).collect();
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        let weight = |i: usize| f64::from(logits[i] - 4.999).exp();
        let total: f64 = (0..logits.len()).map(weight).sum();
        for top_p in [0.001, 0.1, 0.5, 0.9] {
            let mut before = 0.0;
            let kept = order.iter().take_while(|&&i| {
                let inside = before < top_p * total;
                before += weight(i);
                inside
            });
            let kept: std::collections::HashSet<usize> = kept.copied().collect();
            let mut random = Random::new(1, 0);
            let sampling = Sampling { top_p, ..plain() };
            let drawn: std::collections::HashSet<usize> =
                (0..4000).filter_map(|_| sampling.draw(&logits, &mut random)).map(|token| token as usize).collect();
            // The last one is on either side of a sum of thousands.
            assert!(drawn.difference(&kept).count() <= 1, "{top_p}: {:?}", drawn.difference(&kept));
            assert!(drawn.len() > kept.len() / 4, "{top_p}: {} of {}", drawn.len(), kept.len());
        }
    }

    #[test]
    fn what_is_no_number_or_infinite_is_not_drawn_by_chance() {
        near(&shares(&[f32::NAN, 0.0, f32::NEG_INFINITY, 0.0], &plain()), &[0.0, 0.5, 0.0, 0.5]);
        near(&shares(&[0.0, f32::INFINITY, 1.0], &plain()), &[0.0, 1.0, 0.0]);
        assert_eq!(plain().draw(&[f32::NAN], &mut Random::new(0, 0)), None);
        assert_eq!(plain().draw(&[], &mut Random::new(0, 0)), None);
    }

    #[test]
    fn settings_are_checked() {
        assert_eq!(plain().problem(), None);
        for (sampling, named) in [
            (Sampling { temperature: 0.0, ..plain() }, "temperature"),
            (Sampling { temperature: f64::NAN, ..plain() }, "temperature"),
            (Sampling { top_p: 1.5, ..plain() }, "top_p"),
            (Sampling { top_p: f64::NAN, ..plain() }, "top_p"),
            (Sampling { top_k: Some(0), ..plain() }, "top_k"),
        ] {
            assert!(sampling.problem().is_some_and(|problem| problem.starts_with(named)), "{sampling:?}");
        }
    }
}
