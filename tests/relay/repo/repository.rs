//! Tests of repository URLs.

use cogni_gateway::base::host_reach::HostReach;
use cogni_gateway::relay::repo::repository::RepositoryUrl;

/// L6: Every common spelling of a repository gives the same URL, over HTTPS, for which the token is valid.
#[test]
fn every_spelling_of_a_repository_is_the_same_one() {
    for url in [
        "https://github.com/Acme/site",
        "https://github.com/acme/site.git",
        "https://GitHub.com/acme/Site/",
        "git@github.com:acme/site.git",
        "ssh://git@github.com/acme/site.git",
        "ssh://git@github.com:22/acme/site",
        "ssh://git@github.com.:22/acme/site",
        "https://github.com./acme/site",
        "https://github.com:/acme/site",
    ] {
        let repository: RepositoryUrl = url.parse().unwrap();
        assert_eq!(repository.canonical_key(), "github.com/acme/site", "{url}");
        assert_eq!(repository.clone_url().parse(), Ok(repository), "{url}");
    }
}

/// L6: A URL that contains a secret, or that two parsers could read differently, is refused and never repeated.
#[test]
fn a_url_that_holds_a_secret_or_a_trick_is_refused() {
    let answers = [
        "https://hunter2@github.com/acme/site",
        "https://u:hunter2@github.com/acme/site",
        "http://github.com/acme/site",
        "https://github.com/acme",
        "https://github.com/acme/site/tree/main",
        "https://github.com/acme/..",
        "https://github.com/-x/site",
        "https://github.com/acme/site?x=hunter2",
        "https://github.com/acme/%2e%2e",
        "ext::sh -c id",
        "file://relative/site.git",
        "file:///srv/../etc/site.git",
        "relative/site.git",
        "ssh://host/acme/site",
        "https://",
        "https://github.com/acme/site\n",
        "/srv/%2e%2e/site.git",
        "/srv/site\n.git",
        "--upload-pack=id",
        "",
    ]
    .map(|url| (url, url.parse::<RepositoryUrl>().unwrap_err().to_string()));
    assert!(answers.iter().all(|(_, answer)| !answer.contains("hunter2")));
    let messages = answers.map(|(url, answer)| refusal_text(url, &answer));
    insta::assert_snapshot!(messages.join("\n"), @r"
    https://hunter2@github.com/acme/site: holds a user or a password, which has no place there
    https://u:hunter2@github.com/acme/site: holds a user or a password, which has no place there
    http://github.com/acme/site: would send a token over a network in the clear
    https://github.com/acme: has no owner and name
    https://github.com/acme/site/tree/main: has an owner or a name that no repository has
    https://github.com/acme/..: has an owner or a name that no repository has
    https://github.com/-x/site: has an owner or a name that no repository has
    https://github.com/acme/site?x=hunter2: has characters that it cannot have
    https://github.com/acme/%2e%2e: has characters that it cannot have
    ext::sh -c id: has characters that it cannot have
    file://relative/site.git: names no absolute path
    file:///srv/../etc/site.git: names no absolute path
    relative/site.git: is not a URL
    ssh://host/acme/site: has a scheme that is not read
    https://: is not a URL
    https://github.com/acme/site
    : has characters that it cannot have
    /srv/%2e%2e/site.git: has characters that it cannot have
    /srv/site
    .git: has characters that it cannot have
    --upload-pack=id: has a scheme that is not read
    : is not a URL
    ");
}

/// A3: A host has one spelling. A host that some resolvers would read as an address is refused, and so is one with a
/// user name.
#[test]
fn a_host_that_can_be_read_in_two_ways_is_refused() {
    let messages = [
        "https://127.1/acme/site",
        "https://2130706433/acme/site",
        "https://0x7f000001/acme/site",
        "https://0177.0.0.1/acme/site",
        "https://localhost../acme/site",
        "https://[::1%25lo]/acme/site",
        "https://[::1/acme/site",
        "https://github.com:70000/acme/site",
        "https://github.com:0/acme/site",
        "ssh://git@127.1/acme/site",
        "git@0x7f.1:acme/site",
        "git@github.com@evil.example:acme/site",
        "ssh://git@github.com@evil.example/acme/site",
        "ssh://git@github.com:hunter2@evil.example/acme/site",
    ]
    .map(|url| refusal_text(url, &url.parse::<RepositoryUrl>().unwrap_err().to_string()));
    assert!(
        messages.iter().all(|message| !message.split_once(": ").unwrap().1.contains("hunter2"))
    );
    insta::assert_snapshot!(messages.join("\n"), @r"
    https://127.1/acme/site: has a host that is neither a name nor an address in full
    https://2130706433/acme/site: has a host that is neither a name nor an address in full
    https://0x7f000001/acme/site: has a host that is neither a name nor an address in full
    https://0177.0.0.1/acme/site: has a host that is neither a name nor an address in full
    https://localhost../acme/site: has a host that is neither a name nor an address in full
    https://[::1%25lo]/acme/site: has characters that it cannot have
    https://[::1/acme/site: is not a URL
    https://github.com:70000/acme/site: has a port that there is not
    https://github.com:0/acme/site: has a port that there is not
    ssh://git@127.1/acme/site: has a host that is neither a name nor an address in full
    git@0x7f.1:acme/site: has a host that is neither a name nor an address in full
    git@github.com@evil.example:acme/site: holds a user or a password, which has no place there
    ssh://git@github.com@evil.example/acme/site: holds a user or a password, which has no place there
    ssh://git@github.com:hunter2@evil.example/acme/site: holds a user or a password, which has no place there
    ");
}

/// Returns the refusal of a URL without the part that all refusals share.
fn refusal_text(url: &str, answer: &str) -> String {
    format!("{url}: {}", answer.split_once(';').unwrap().0.replace("the repository's URL ", ""))
}

#[test]
fn a_repository_on_this_machine_is_its_path() {
    for spelling in ["file:///srv/git/site.git", "/srv/git/site.git", "/srv//git/./site.git/"] {
        let repository: RepositoryUrl = spelling.parse().unwrap();
        assert_eq!(repository.canonical_key(), "file:///srv/git/site.git");
        assert!(repository.as_hosted().is_none());
    }
}

/// A3: A recorded repository includes the reach of its host; a row of an earlier version keeps the reach that it had.
#[test]
fn a_repository_that_is_written_down_leads_no_further_afterwards() {
    let named: RepositoryUrl = "https://git.example/acme/site".parse().unwrap();
    for reach in [HostReach::Public, HostReach::Named] {
        let repository = named.clone().with_reach(reach);
        let text = serde_json::to_string(&repository).unwrap();
        let read: RepositoryUrl = serde_json::from_str(&text).unwrap();
        assert_eq!((read.as_hosted().unwrap().reach(), &read), (reach, &repository), "{text}");
    }
    let earlier = r#"{"repository":"https://git.example/acme/site.git"}"#;
    assert_eq!(serde_json::from_str::<RepositoryUrl>(earlier).unwrap(), named);
}
