//! Numbers, refused in words that say the range.

/// A whole number in a range.
pub(super) fn whole(
    least: usize,
    most: usize,
) -> impl Fn(&str) -> Result<usize, String> + Clone + Send + Sync + 'static {
    move |text| {
        let number = text.trim().parse().ok().filter(|number| (least..=most).contains(number));
        number.ok_or_else(|| format!("expected a whole number from {least} to {most}"))
    }
}

/// A number in a range.
pub(super) fn real(least: f64, most: f64) -> impl Fn(&str) -> Result<f64, String> + Clone + Send + Sync + 'static {
    move |text| {
        // No range holds a NaN.
        let number = text.trim().parse().ok().filter(|number| (least..=most).contains(number));
        number.ok_or_else(|| format!("expected a number from {least} to {most}"))
    }
}

/// A seed.
pub(super) fn seed(text: &str) -> Result<u64, String> {
    text.trim().parse().map_err(|_| format!("expected a whole number from 0 to {}", u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_beyond_the_range_are_refused_with_it() {
        assert_eq!(whole(1, 9)("9"), Ok(9));
        for bad in ["0", "10", "-1", "1.5", "a", "", "99999999999999999999"] {
            assert_eq!(whole(1, 9)(bad), Err("expected a whole number from 1 to 9".to_owned()), "{bad}");
        }
        assert_eq!(real(-1.0, 0.5)("-1e0"), Ok(-1.0));
        for bad in ["0.6", "-1.1", "NaN", "inf", "a", ""] {
            assert_eq!(real(-1.0, 0.5)(bad), Err("expected a number from -1 to 0.5".to_owned()), "{bad}");
        }
        assert_eq!(seed("7"), Ok(7));
        assert!(seed("-1").is_err_and(|e| e.starts_with("expected a whole number from 0 to")));
    }
}
