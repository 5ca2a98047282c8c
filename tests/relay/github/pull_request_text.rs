//! An agent's words on a page, and the relay's part among other people's.

use cogni_gateway::relay::github::pull_request::{managed_section, safe_text};
use proptest::prelude::*;

/// L6: whatever an agent writes notifies nobody, closes nothing and loads nothing.
#[test]
fn an_agents_words_do_nothing() {
    let told = [
        "@acme/owners and @alice, mail a@b.example",
        "Fixes #12, closes acme/site#3, resolves GH-7 and gh-8",
        "fixes: https://github.com/acme/site/issues/1, closed HTTP://x.example/2",
        "![pixel](https://x.example/?secret) <img src=x> </details> <!-- /cogni --> <?x?>",
        "# A heading, 1 < 2, a -- b, #hash, 50 %, prefixes https",
        "```\n@alice in code #1\n```",
        "left\u{202e}thgir\u{7}",
        "&commat;alice, &#x40;bob, fixes &#x23;12 and GH&#45;7, AT&T, a & b, fixes GH\\-7",
        "fixes\\: https://github.com/acme/site/issues/1",
    ]
    .map(|words| safe_text::format_body(words).replace('\u{200b}', "·"));
    insta::assert_snapshot!(told.join("\n"), @r"
    @·acme/owners and @·alice, mail a@·b.example
    Fixes #·12, closes acme/site#·3, resolves GH-·7 and gh-·8
    fixes·: https://github.com/acme/site/issues/1, closed· HTTP://x.example/2
    !·[pixel](https://x.example/?secret) <·img src=x> <·/details> <·!-- /cogni --> <·?x?>
    # A heading, 1 < 2, a -- b, #hash, 50 %, prefixes https
    ```
    @·alice in code #·1
    ```
    leftthgir
    &·commat;alice, &·#x40;bob, fixes &·#x23;12 and GH&·#·45;7, AT&·T, a & b, fixes GH\·-7
    fixes\·: https://github.com/acme/site/issues/1
    ");
}

/// L6: a block of code that an agent leaves open does not take in what the relay says below it.
#[test]
fn a_block_of_code_ends_with_the_agents_words() {
    for (words, shown) in [
        ("```", "```\n```"),
        ("a\n~~~~ rust `x`\nb\n~~~", "a\n~~~~ rust `x`\nb\n~~~\n~~~~"),
        ("```\na\n```", "```\na\n```"),
        ("````\n```\n````  \nb", "````\n```\n````  \nb"),
        ("``` a`b\nc", "``` a`b\nc"),
        ("```\n```x\n    ```", "```\n```x\n    ```\n```"),
        // Of a list's item or of none: moved to where it is of none.
        ("- a\n\n  ```\n  b\n  ```\nc", "- a\n\n```\n  b\n  ```\nc"),
        ("- a\n\n  ```\n  b", "- a\n\n```\n  b\n```"),
        ("> ```\n> a", "> ```\n> a"),
        ("    ```\na", "```\na\n```"),
        ("a\n    ```\nb", "a\n    ```\nb"),
    ] {
        assert_eq!(safe_text::format_body(words), shown, "{words:?}");
    }
}

/// L6: a title is one line, not too long, and never empty.
#[test]
fn a_title_is_one_short_line() {
    assert_eq!(safe_text::format_title("\n  Fix the login\nand more", "x"), "Fix the login");
    assert_eq!(
        safe_text::format_title(" \n", "Changes from sandbox/task-1"),
        "Changes from sandbox/task-1"
    );
    assert_eq!(safe_text::format_title(&"a".repeat(500), "x").chars().count(), 121);
}

/// L6: what people wrote stays, byte for byte; a run's own part is replaced, another run's stays beside it.
#[test]
fn the_relays_part_stands_among_other_peoples_words() {
    let first = managed_section::upsert_section(None, "run-1", "one").unwrap();
    let edited = format!("Dear all,\r\n\r\n{first}\r\n- [ ] checked by hand\r\n");
    let second = managed_section::upsert_section(Some(&edited), "run-2", "two").unwrap();
    let again = managed_section::upsert_section(Some(&second), "run-1", "one, again").unwrap();
    insta::assert_snapshot!(again.replace('\r', "␍"), @r"
    Dear all,␍
    ␍
    <!-- cogni:run run-1 -->
    one, again
    <!-- /cogni -->

    <!-- cogni:run run-2 -->
    two
    <!-- /cogni -->␍
    - [ ] checked by hand␍
    ");
    assert_eq!(
        managed_section::upsert_section(Some(&again), "run-1", "one, again").as_ref(),
        Some(&again)
    );
}

/// L6: a mark without its other half is not the relay's, and takes nothing with it.
#[test]
fn a_broken_mark_takes_nothing_with_it() {
    let text =
        "<!-- cogni:run run-1 -->\nkept\n<!-- cogni:run run-2 -->\nold\n<!-- /cogni -->\nalso kept";
    insta::assert_snapshot!(managed_section::upsert_section(Some(text), "run-2", "new").unwrap(), @r"
    <!-- cogni:run run-1 -->
    kept
    <!-- cogni:run run-2 -->
    new
    <!-- /cogni -->
    also kept
    ");
}

/// L6: GitHub's bound on a text holds: old runs give way, people's words never.
#[test]
fn a_full_text_loses_its_oldest_runs_and_none_of_the_peoples_words() {
    let mut text = Some("kept".to_owned());
    for run in 0..40 {
        text = managed_section::upsert_section(
            text.as_deref(),
            &format!("run-{run}"),
            &"x".repeat(4_000),
        );
    }
    let text = text.unwrap();
    assert!(text.chars().count() <= 65_000 && text.starts_with("kept"));
    assert!(text.contains("cogni:run run-39 ") && !text.contains("cogni:run run-0 "));
    assert_eq!(
        managed_section::upsert_section(Some(&"x".repeat(64_990)), "run-1", "no room"),
        None
    );
}

/// L6: what a run has said that needs a review stays, however many come after it; what it listed goes before that.
#[test]
fn a_notice_never_gives_way() {
    let reasons = "\n- `a/path`: a reason".repeat(10);
    let words = |run: u32| {
        let words = "x".repeat(3_000);
        let notice =
            format!("{}\n**Run {run}: a review.**\n{reasons}", managed_section::NOTICE_MARK);
        if run.is_multiple_of(2) { format!("{words}\n\n{notice}") } else { words }
    };
    let mut text = Some("kept".to_owned());
    for run in 0..300 {
        text = managed_section::upsert_section(text.as_deref(), &format!("run-{run}"), &words(run));
    }
    let text = text.unwrap();
    assert!(text.chars().count() <= 65_000 && text.starts_with("kept"));
    for run in (0..300).step_by(2) {
        assert!(text.contains(&format!("**Run {run}: a review.**")), "{run}");
    }
    assert!(!text.contains("cogni:run run-1 ") && text.contains("cogni:run run-299 "));
    // Each is a part of its run still, which may be put again.
    let again = managed_section::upsert_section(Some(&text), "run-0", "seen").unwrap();
    assert_eq!(again.matches("cogni:run run-0 ").count(), 1);
    assert!(!again.contains("**Run 0: a review.**"));
}

proptest! {
    /// L6: for every text: outside of our parts nothing changes, and what we put twice stands there once.
    #[test]
    fn a_part_is_put_once_and_changes_nothing_else(
        before in "(?s).{0,40}", after in "(?s).{0,40}", words in "[a-z ]{0,20}",
    ) {
        let marks = ["<!--", "-->"];
        prop_assume!(!marks.iter().any(|mark| before.contains(mark) || after.contains(mark)));
        let own = managed_section::upsert_section(None, "run-1", "old").unwrap();
        let text = format!("{before}{own}{after}");
        let put = managed_section::upsert_section(Some(&text), "run-1", &words).unwrap();
        prop_assert!(put.starts_with(&before) && put.ends_with(&after));
        prop_assert_eq!(put.matches("cogni:run").count(), 1);
        prop_assert_eq!(managed_section::upsert_section(Some(&put), "run-1", &words).unwrap(), put);
    }

    /// L6: where every line has been read as the page reads it, no block of code is open at the end.
    #[test]
    fn no_block_of_code_is_open(words in "(```|~~~~|`|~| {1,4}|\n|- |> |a){0,30}") {
        let mut open: Option<(char, usize)> = None;
        for line in safe_text::format_body(&words).lines() {
            let marks = line.trim_start_matches(' ');
            let indent = line.len() - marks.len();
            let sign = marks.chars().next().unwrap_or_default();
            let length = marks.chars().take_while(|mark| *mark == sign).count();
            let rest = &marks[marks.chars().take(length).map(char::len_utf8).sum()..];
            let is_fence = "`~".contains(sign) && length >= 3 && indent <= 3;
            open = match open {
                None if is_fence && (sign == '~' || !rest.contains('`')) => {
                    // Elsewhere it might be an item's, and end with it.
                    prop_assert_eq!(indent, 0, "{}", line);
                    Some((sign, length))
                }
                Some((own, least)) if is_fence && sign == own && length >= least && rest.trim().is_empty() => None,
                open => open,
            };
        }
        prop_assert_eq!(open, None);
    }

    /// L6: an agent cannot end the relay's part, or begin another.
    #[test]
    fn no_words_break_out_of_the_part(words in "(?s)(<!-- ?/?cogni(:run x)? ?-->|.){0,30}") {
        let put = managed_section::upsert_section(None, "run-1", &safe_text::format_body(&words)).unwrap();
        prop_assert_eq!(put.matches("<!-- cogni:run").count(), 1);
        prop_assert_eq!(put.matches("<!-- /cogni -->").count(), 1);
    }
}
