//! Pointers of Git LFS: small texts in place of large files, which are stored elsewhere.

use super::normalize::fold_case_and_invisible;

/// Returns true if a file with this beginning is a pointer, or nearly one.
///
/// Git LFS trims the text, skips blank lines and lines of extensions, and knows three names of its format. This test
/// accepts more than any version of Git LFS does, because a later version may read what the present one refuses.
pub(super) fn is_lfs_pointer(beginning: &[u8]) -> bool {
    let text = fold_case_and_invisible(beginning);
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    // Lines of extensions, such as `ext-0-crypt sha256:…`, may stand before the version.
    let mut rest = lines.skip_while(|line| line.starts_with("ext-"));
    let Some(format) = rest.next().and_then(|line| line.strip_prefix("version ")) else {
        return false;
    };
    // An unknown format counts if the text names an object by its hash.
    FORMAT_URLS.iter().any(|url| format.trim_start().starts_with(url))
        || rest.any(|line| line.starts_with("oid sha256:"))
}

/// The addresses that all names of the format begin with, from the latest to the oldest.
/// <https://github.com/git-lfs/git-lfs/blob/main/lfs/pointer.go>
const FORMAT_URLS: [&str; 3] = [
    "https://git-lfs.github.com/spec/",
    "https://hawser.github.com/spec/",
    "http://git-media.io/v",
];

#[cfg(test)]
mod tests {
    use super::is_lfs_pointer;

    /// L5: Every text that Git LFS takes for a pointer is one.
    #[test]
    fn every_spelling_of_a_pointer_is_recognised() {
        let oid = format!("oid sha256:{}\nsize 1\n", "4d7a2146".repeat(8));
        let latest = format!("version https://git-lfs.github.com/spec/v1\n{oid}");
        // `git lfs pointer --check` accepts these.
        let pointers = [
            latest.clone(),
            latest.replace('\n', "\r\n"),
            latest.replace('\n', "\n\n"),
            format!("\n \t\r\n\u{a0}\u{85}\u{3000}{latest}"),
            format!("{latest}{}", " ".repeat(2000)),
            format!("version http://git-media.io/v/2\n{oid}"),
            format!("version https://hawser.github.com/spec/v1\n{oid}"),
            format!("ext-0-foo sha256:00\n{latest}"),
            // It does not accept these, but another version may.
            format!("\u{feff}{latest}"),
            format!("Version https://git-lfs.github.com/spec/v2\n{oid}"),
            format!("version https://example.com/large/v9\next-0-foo sha256:00\n {oid}"),
            "version https://git-lfs.github.com/spec/v1\n".to_owned(),
        ];
        for text in pointers {
            assert!(is_lfs_pointer(text.as_bytes()), "{text:?}");
        }
        let others = [
            String::new(),
            oid,
            format!("See\n{latest}"),
            "version 1.2 of git-lfs\n".to_owned(),
            "version = \"1\"\noid = 3\n".to_owned(),
        ];
        for text in others {
            assert!(!is_lfs_pointer(text.as_bytes()), "{text:?}");
        }
    }
}
