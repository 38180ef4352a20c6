//! Which token comes next: the most probable, or one drawn at random.

use crate::error::{Error, Result};
use crate::random::Random;

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
        let mut tokens: Vec<(i64, f64)> = (0..)
            .zip(logits)
            .filter(|(_, logit)| !logit.is_nan())
            .map(|(token, &logit)| (token, f64::from(logit)))
            .collect();
        let by_probability = |a: &(i64, f64), b: &(i64, f64)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        if let Some(k) = self.top_k.filter(|&k| k < tokens.len()) {
            tokens.select_nth_unstable_by(k - 1, by_probability);
            tokens.truncate(k);
        }
        tokens.sort_unstable_by(by_probability);
        let most = tokens.first()?.1;
        if most.is_infinite() {
            return tokens.first().map(|&(token, _)| token);
        }
        for (_, logit) in &mut tokens {
            *logit = ((*logit - most) / self.temperature).exp();
        }
        let total: f64 = tokens.iter().map(|(_, weight)| weight).sum();
        let mut before = 0.0;
        let kept = tokens.iter().take_while(|(_, weight)| {
            let reached = before >= self.top_p * total;
            before += weight;
            !reached
        });
        let kept = kept.count().max(1);
        let total: f64 = tokens[..kept].iter().map(|(_, weight)| weight).sum();
        let mut left = random.uniform() * total;
        let drawn = tokens[..kept].iter().find(|(_, weight)| {
            left -= weight;
            left < 0.0
        });
        drawn.or(tokens.first()).map(|&(token, _)| token)
    }
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
    let mut best: Option<(i64, f32)> = None;
    for (token, &logit) in (0..).zip(logits) {
        if !logit.is_nan() && best.is_none_or(|(_, most)| logit > most) {
            best = Some((token, logit));
        }
    }
    best.map(|(token, _)| token)
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
