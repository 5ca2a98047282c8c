//! Tests of the text of a pull request: an agent's text is made harmless, and the relay's section stands beside other
//! people's text.

use cogni_gateway::relay::github::pull_request::change_summary::{ChangeSummary, CommitLine};
use cogni_gateway::relay::github::pull_request::{managed_section, safe_text};
use cogni_gateway::relay::repo::ObjectId;
use proptest::prelude::*;

/// L6: Text of an agent notifies no user, closes no issue and loads no image.
#[test]
fn text_of_an_agent_has_no_side_effects() {
    let messages = [
        "@acme/owners and @alice, mail a@b.example",
        "Fixes #12, closes acme/site#3, resolves GH-7 and gh-8",
        "fixes: https://github.com/acme/site/issues/1, closed HTTP://x.example/2",
        "![pixel](https://x.example/?secret) <img src=x> </details> <!-- /cogni --> <?x?>",
        "# A heading, 1 < 2, a -- b, #hash, 50 %, prefixes https",
        "```\n@alice in code #1\n```",
        "left\u{202e}th\u{61c}g\u{e0041}i\u{2028}r\u{7}, \u{1f44d}\u{fe0f}",
        "&commat;alice, &#x40;bob, fixes &#x23;12 and GH&#45;7, AT&T, a & b, fixes GH\\-7",
        "fixes\\: https://github.com/acme/site/issues/1",
        "```mermaid\na\n```\n~~~ geojson\n~~~\n````rust\n````\n- ``` stl x\n~~~`",
    ]
    .map(|words| safe_text::format_quote(words).replace('\u{200b}', "·"));
    insta::assert_snapshot!(messages.join("\n"), @r"
    > @·acme/owners and @·alice, mail a@·b.example
    > Fixes #·12, closes acme/site#·3, resolves GH-·7 and gh-·8
    > fixes·: https:·//github.com/acme/site/issues/1, closed· HTTP:·//x.example/2
    > !·[pixel]·(https:·//x.example/?secret) <·img src=x> <·/details> <·!-- /cogni --> <·?x?>
    > # A heading, 1 < 2, a -- b, #hash, 50 %, prefixes https
    > ```
    > @·alice in code #·1
    > ```
    > leftthgir, 👍️
    > &·commat;alice, &·#x40;bob, fixes &·#x23;12 and GH&·#·45;7, AT&·T, a & b, fixes GH\·-7
    > fixes\·: https:·//github.com/acme/site/issues/1
    > ```·mermaid
    > a
    > ```
    > ~~~· geojson
    > ~~~
    > ````rust
    > ````
    > - ```· stl x
    > ~~~·`
    ");
}

/// L6: Each line of an agent's text is quoted, so a reader sees where the text ends, and no open code block includes the
/// relay's text below it.
#[test]
fn an_agents_text_is_a_quote() {
    for (words, shown) in [
        ("```", "> ```"),
        ("\n a\n\n- b\n\n  ```\n  c\n", "> a\n> \n> - b\n> \n>   ```\n>   c"),
        ("a\r\nb", "> a\n> b"),
        (" \u{200b}\n", ""),
    ] {
        assert_eq!(safe_text::format_quote(words), shown, "{words:?}");
    }
}

/// L6: A title is one line, not too long, and never empty.
#[test]
fn a_title_is_one_short_line() {
    assert_eq!(safe_text::format_title("\n  Fix the login\nand more", "x"), "Fix the login");
    assert_eq!(
        safe_text::format_title(" \n", "Changes from sandbox/task-1"),
        "Changes from sandbox/task-1"
    );
    assert_eq!(safe_text::format_title(&"a".repeat(500), "x").chars().count(), 121);
}

/// L6: Text of people stays byte for byte. A run's own section is replaced, and another run's section stays beside it.
#[test]
fn the_relays_section_stands_beside_other_text() {
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

/// L6: A marker without its counterpart is not the relay's, and removes nothing.
#[test]
fn a_broken_marker_removes_nothing() {
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

/// L6: The text stays within GitHub's limit: sections of old runs are shortened, text of people never.
#[test]
fn a_full_text_loses_its_oldest_runs_and_no_text_of_people() {
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

/// L6: A run's notice that its work needs a review stays, however many runs follow. The run's list of changes is
/// removed first.
#[test]
fn a_notice_is_never_removed() {
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
    // Each is still the section of its run, which may be written again.
    let again = managed_section::upsert_section(Some(&text), "run-0", "seen").unwrap();
    assert_eq!(again.matches("cogni:run run-0 ").count(), 1);
    assert!(!again.contains("**Run 0: a review.**"));
}

proptest! {
    /// L6: For any text, nothing outside the sections changes, and a section that is written twice appears once.
    #[test]
    fn a_section_is_written_once_and_changes_nothing_else(
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

    /// L6: No line of an agent's text stands outside of its quote.
    #[test]
    fn no_line_leaves_its_quote(words in "(```|~~~~|> |\n|\r|\u{85}|\u{2028}|- |a){0,30}") {
        let quote = safe_text::format_quote(&words);
        let mut lines = quote.split(['\n', '\r', '\u{85}', '\u{2028}']);
        prop_assert!(quote.is_empty() || lines.all(|line| line.starts_with("> ")), "{}", quote);
    }

    /// L6: Text of an agent cannot end the relay's section or begin another one.
    #[test]
    fn no_text_breaks_out_of_the_section(words in "(?s)(<!-- ?/?cogni(:run x)? ?-->|.){0,30}") {
        let put = managed_section::upsert_section(None, "run-1", &safe_text::format_quote(&words)).unwrap();
        prop_assert_eq!(put.matches("<!-- cogni:run").count(), 1);
        prop_assert_eq!(put.matches("<!-- /cogni -->").count(), 1);
    }
}

proptest! {
    /// L6: Whatever agents and users write, the facts of a run have no link, picture, mention, issue or HTML of theirs,
    /// and no text of theirs ends its code block.
    #[test]
    fn hostile_texts_stay_in_their_quotes(
        pieces in prop::collection::vec(prop::sample::select(HOSTILE_PIECES.to_vec()), 0..30),
        cut in 0..30_usize,
    ) {
        let cut = cut.min(pieces.len());
        let (subject, asked) = (pieces[..cut].concat(), pieces[cut..].concat());
        let id = ObjectId::hash_object("blob", b"");
        let summary = ChangeSummary {
            commits: vec![CommitLine { id, subject: subject.clone() }],
            commit_count: 1,
            asked: asked.clone(),
            model: subject,
            verdict: "push".to_owned(),
            ..ChangeSummary::default()
        };
        let text = summary.commit_list() + &summary.details(id);
        let theirs = text.replacen("<details>\n<summary>Request, cost and proof</summary>", "", 1);
        let theirs = theirs.strip_suffix("</details>").unwrap();
        let is_tag = |rest: &str| rest.starts_with(|c: char| c.is_ascii_alphabetic() || "/!?".contains(c));
        prop_assert!(!theirs.split('<').skip(1).any(is_tag), "{}", text);
        for sign in ["](", "]:", "![", "://", "@a", "#1", "www."] {
            prop_assert!(!text.contains(sign), "{sign} in {text}");
        }
        let fences = text.lines().filter(|line| line.trim_start().starts_with("```")).count();
        let expected = if safe_text::format_code_block(&asked, 2000).is_empty() { 0 } else { 2 };
        prop_assert_eq!(fences, expected, "{}", text);
        // A line of one quoted text has the two quotes of its code, and no other.
        for line in text.lines().filter(|line| line.starts_with("- `") || line.starts_with("- model")) {
            prop_assert_eq!(line.matches('`').count() % 2, 0, "{}", line);
        }
    }
}

/// Pieces of texts that would do something on a forge's page.
const HOSTILE_PIECES: &[&str] = &[
    "@a",
    "#1",
    "fixes ",
    "closes #1",
    "[x](",
    "](https://x)",
    "![p](http://x)",
    "https://x.example",
    "www.x.example",
    "<img src=x>",
    "</details>",
    "<!-- /cogni -->",
    "```",
    "~~~",
    "`",
    "``",
    "\n",
    "\n\n",
    "    ",
    "- ",
    "> ",
    "[a]: http://x",
    "|",
    "&commat;a",
    "\\",
    "<",
    "\u{202e}",
    "\u{7}",
    "\t",
    "word ",
];
