//! The noise schedule, and single steps back along it.

/// Steps that the published models are trained on.
pub const TRAINED_STEPS: usize = 1000;
/// The first and last of the trained steps' betas; linear between.
const BETAS: (f64, f64) = (1e-4, 0.02);

/// One step of the schedule that is sampled: the reverse process q(x_{t-1} | x_t, x_0) and what else the samplers need.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Step {
    /// The trained step: what the model is told.
    pub(super) timestep: usize,
    beta: f64,
    /// Share of the picture's variance that is left here and at the step after, which has less noise.
    alpha_bar: f64,
    alpha_bar_next: f64,
    /// The reverse process's variance; at the last step, where it is 0, that of the step before.
    posterior_variance: f64,
}

/// How the next picture is drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Sampler {
    /// Ancestral sampling (Ho et al., arXiv 2006.11239), with the model's variance if it gives one (arXiv 2102.09672).
    Ddpm,
    /// DDIM (arXiv 2010.02502); `eta` is the share of DDPM's noise, 0 for none.
    Ddim {
        /// 0 to 1.
        eta: f64,
    },
}

/// `steps` of the trained steps, from noise to picture: evenly spaced with both ends, as the published sampler spaces them.
pub(super) fn respaced(steps: usize) -> Vec<Step> {
    let stride = if steps > 1 { (TRAINED_STEPS - 1) as f64 / (steps - 1) as f64 } else { 0.0 };
    // Added up one by one: products would round otherwise halfway between two steps.
    let places = std::iter::successors(Some(0.0), |place| Some(place + stride));
    let timesteps: Vec<usize> = places.take(steps).map(|place: f64| place.round_ties_even() as usize).collect();
    let beta = |t: usize| BETAS.0 + (BETAS.1 - BETAS.0) * t as f64 / (TRAINED_STEPS - 1) as f64;
    let all: Vec<f64> = (0..TRAINED_STEPS)
        .scan(1.0, |product, t| {
            *product *= 1.0 - beta(t);
            Some(*product)
        })
        .collect();
    let mut chosen: Vec<Step> = Vec::with_capacity(steps);
    for &timestep in &timesteps {
        let alpha_bar_next = chosen.last().map_or(1.0, |step| step.alpha_bar);
        let alpha_bar = all[timestep];
        let beta = 1.0 - alpha_bar / alpha_bar_next;
        let posterior_variance = beta * (1.0 - alpha_bar_next) / (1.0 - alpha_bar);
        chosen.push(Step { timestep, beta, alpha_bar, alpha_bar_next, posterior_variance });
    }
    // Its logarithm is needed also where the variance is 0.
    let second = chosen.get(1).map_or(0.0, |step| step.posterior_variance);
    if let Some(last) = chosen.first_mut() {
        last.posterior_variance = if second > 0.0 { second } else { last.beta };
    }
    chosen.reverse();
    chosen
}

impl Step {
    fn is_last(&self) -> bool {
        self.alpha_bar_next == 1.0
    }

    /// The picture without noise that `noise` means, within -1 to 1 if it is to be clipped.
    fn picture(&self, x: f64, noise: f64, clip: bool) -> f64 {
        let picture = (1.0 / self.alpha_bar).sqrt() * x - (1.0 / self.alpha_bar - 1.0).sqrt() * noise;
        if clip { picture.clamp(-1.0, 1.0) } else { picture }
    }

    /// One number of the next picture: `x` the present one, `noise` what the model thinks is noise in it, `variance` its
    /// interpolation between the smallest (-1) and the largest (1) log-variance if it gives one, `random` standard normal.
    pub(super) fn next(
        &self,
        sampler: Sampler,
        clip: bool,
        x: f64,
        noise: f64,
        variance: Option<f64>,
        random: f64,
    ) -> f64 {
        let picture = self.picture(x, noise, clip);
        let random = if self.is_last() { 0.0 } else { random };
        match sampler {
            Sampler::Ddpm => {
                let of_picture = self.beta * self.alpha_bar_next.sqrt() / (1.0 - self.alpha_bar);
                let of_x = (1.0 - self.alpha_bar_next) * (1.0 - self.beta).sqrt() / (1.0 - self.alpha_bar);
                let log_variance = match variance {
                    Some(v) => {
                        let share = (v + 1.0) / 2.0;
                        share * self.beta.ln() + (1.0 - share) * self.posterior_variance.ln()
                    }
                    None => self.beta.ln(),
                };
                of_picture * picture + of_x * x + (0.5 * log_variance).exp() * random
            }
            Sampler::Ddim { eta } => {
                // The noise anew, because a clipped picture means another.
                let noise = ((1.0 / self.alpha_bar).sqrt() * x - picture) / (1.0 / self.alpha_bar - 1.0).sqrt();
                let sigma = eta
                    * ((1.0 - self.alpha_bar_next) / (1.0 - self.alpha_bar)).sqrt()
                    * (1.0 - self.alpha_bar / self.alpha_bar_next).sqrt();
                let rest = (1.0 - self.alpha_bar_next - sigma * sigma).max(0.0);
                self.alpha_bar_next.sqrt() * picture + rest.sqrt() * noise + sigma * random
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timesteps(steps: usize) -> Vec<usize> {
        respaced(steps).iter().map(|step| step.timestep).collect()
    }

    #[test]
    fn steps_are_spread_over_the_whole_schedule() {
        assert_eq!(timesteps(1), [0]);
        assert_eq!(timesteps(4), [999, 666, 333, 0]);
        let fifty = timesteps(50);
        assert_eq!((fifty[0], fifty[1], fifty[48], fifty[49]), (999, 979, 20, 0));
        // Sums that end on either side of a half: `space_timesteps` of the published code.
        assert_eq!((timesteps(21)[10], timesteps(31)[15], timesteps(43)[21], timesteps(43)[7]), (499, 500, 499, 833));
        assert_eq!(timesteps(1000), (0..1000).rev().collect::<Vec<usize>>());
    }

    #[test]
    fn betas_of_kept_steps_multiply_to_the_same() {
        let full = respaced(1000);
        assert!((full[0].beta - 0.02).abs() < 1e-12 && (full[999].beta - 1e-4).abs() < 1e-12);
        for steps in [2, 50, 250] {
            let kept = respaced(steps);
            assert!((kept[0].alpha_bar - full[0].alpha_bar).abs() < 1e-15);
            let product: f64 = kept.iter().map(|step| 1.0 - step.beta).product();
            assert!((product / full[0].alpha_bar - 1.0).abs() < 1e-9, "{steps}");
            assert!(kept.iter().all(|step| step.posterior_variance > 0.0 && step.posterior_variance <= step.beta));
        }
    }

    /// Whatever the step, true noise leads back to the picture: x_t = sqrt(a) x_0 + sqrt(1 - a) noise.
    #[test]
    fn true_noise_leads_to_the_picture() {
        let (picture, noise) = (0.3, -1.7);
        for sampler in [Sampler::Ddpm, Sampler::Ddim { eta: 0.0 }, Sampler::Ddim { eta: 1.0 }] {
            for step in respaced(20) {
                let noisy = |alpha_bar: f64| alpha_bar.sqrt() * picture + (1.0 - alpha_bar).sqrt() * noise;
                let next = step.next(sampler, false, noisy(step.alpha_bar), noise, Some(-1.0), 0.0);
                if step.is_last() || sampler == (Sampler::Ddim { eta: 0.0 }) {
                    assert!((next - noisy(step.alpha_bar_next)).abs() < 1e-9, "{sampler:?} {step:?}");
                }
            }
        }
    }

    /// Where the picture is clipped, the step goes on from it, with the noise that leads from it to x.
    #[test]
    fn clipped_pictures_mean_another_noise() {
        let step = &respaced(20)[10];
        let (x, noise) = (2.5, -1.0);
        let own = (x - step.alpha_bar.sqrt()) / (1.0 - step.alpha_bar).sqrt();
        let expected = step.alpha_bar_next.sqrt() + (1.0 - step.alpha_bar_next).sqrt() * own;
        let found = step.next(Sampler::Ddim { eta: 0.0 }, true, x, noise, None, 0.0);
        assert!((found - expected).abs() < 1e-9, "{found}, expected {expected}");
        assert!((step.next(Sampler::Ddim { eta: 0.0 }, false, x, noise, None, 0.0) - expected).abs() > 0.1);
    }

    /// DDIM with eta = 1 draws from DDPM's reverse process with its smallest variance.
    #[test]
    fn ddim_with_all_noise_is_ddpm() {
        for step in respaced(20).iter().filter(|step| !step.is_last()) {
            for (x, noise, random) in [(0.5, 0.2, 0.0), (-1.5, 1.0, 0.7), (0.1, -0.4, -2.0)] {
                let ddim = step.next(Sampler::Ddim { eta: 1.0 }, false, x, noise, None, random);
                let ddpm = step.next(Sampler::Ddpm, false, x, noise, Some(-1.0), random);
                assert!((ddim - ddpm).abs() < 1e-9, "{step:?}: {ddim} {ddpm}");
            }
        }
    }

    #[test]
    fn the_variance_is_between_its_bounds_and_the_last_step_has_none() {
        let steps = respaced(10);
        let spread = |step: &Step, variance| {
            let at = |random| step.next(Sampler::Ddpm, false, 0.0, 0.0, variance, random);
            at(1.0) - at(0.0)
        };
        assert!((spread(&steps[3], Some(1.0)).powi(2) - steps[3].beta).abs() < 1e-12);
        assert!((spread(&steps[3], Some(-1.0)).powi(2) - steps[3].posterior_variance).abs() < 1e-12);
        assert!((spread(&steps[3], None).powi(2) - steps[3].beta).abs() < 1e-12);
        assert_eq!(spread(&steps[9], Some(1.0)), 0.0);
    }

    #[test]
    fn clipping_keeps_pictures_in_range() {
        let step = &respaced(10)[9];
        assert!(step.next(Sampler::Ddim { eta: 0.0 }, false, 3.0, 0.0, None, 0.0) > 2.9);
        assert_eq!(step.next(Sampler::Ddim { eta: 0.0 }, true, 3.0, 0.0, None, 0.0), 1.0);
    }
}
