//! Patterns of names, in which `*` stands for any text.

/// Whether the whole of `name` is what `pattern` says.
pub fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    // The first part is at the beginning, the last one at the end, each other at the first place after the one before it.
    let Some(mut rest) = parts.next().and_then(|first| name.strip_prefix(first)) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn patterns() {
        for (pattern, name, expected) in [
            ("aux", "aux", true),
            ("aux", "aux.weight", false),
            ("aux.*", "aux.weight", true),
            ("aux.*", "aux.", true),
            ("aux.*", "head.aux.weight", false),
            ("*.weight", "aux.weight", true),
            ("*", "", true),
            ("a*b*c", "a.b.b.c", true),
            ("a*b*c", "a.c", false),
            ("a*a", "a", false),
            ("12*21", "121", false),
            ("**", "x", true),
            ("", "", true),
            ("", "x", false),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern:?} {name:?}");
        }
    }
}
