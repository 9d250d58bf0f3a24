/* attacker MODE ARG...: what a program of a container does to whatever comes into its
 * pid namespace, or opens its files. The tests of package hostile put it into an image, those
 * of supervisor/launch into the root of a container. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <linux/keyctl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SPINS = 20000, SMALL = 512, LARGE = 1 << 18 };

/* next is the pid that will be given out next, when nobody else forks. */
static pid_t next(void)
{
	pid_t last = fork();
	if (last == 0)
		_exit(0);
	waitpid(last, NULL, 0);
	return last + 1;
}

/* hit sends each pid the signal as soon as there is such a process. */
static void hit(int number)
{
	for (;;) {
		pid_t pid = next();
		for (int i = 0; i < SPINS && kill(pid, number) != 0; i++)
			;
	}
}

static char *file(pid_t pid, const char *name)
{
	static char path[SMALL];
	snprintf(path, sizeof path, "/proc/%d/%s", pid, name);
	return path;
}

static int opens(const char *path, int flags)
{
	int fd = open(path, flags | O_CLOEXEC);
	if (fd >= 0)
		close(fd);
	return fd >= 0;
}

/* readall gives back what a file has, "" if it cannot be read. */
static char *readall(const char *path, ssize_t *size)
{
	static char pair[2][LARGE + 1];
	static int turn;
	char *content = pair[turn ^= 1]; // the one before stays
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n;
	for (*size = 0; fd >= 0 && *size < LARGE && (n = read(fd, content + *size, LARGE - *size)) > 0; *size += n)
		;
	if (fd >= 0)
		close(fd);
	content[*size] = 0;
	return content;
}

static int has(const char *path, const char *text)
{
	ssize_t size;
	char *content = readall(path, &size);
	return memmem(content, size, text, strlen(text)) != NULL;
}

/* linked reports whether a descriptor leads to what has the text in its name. */
static int linked(pid_t pid, const char *text)
{
	int found = 0;
	DIR *all = opendir(file(pid, "fd"));
	for (struct dirent *one; all && (one = readdir(all));) {
		char to[SMALL];
		ssize_t n = readlinkat(dirfd(all), one->d_name, to, sizeof to);
		found |= n > 0 && memmem(to, n, text, strlen(text)) != NULL;
	}
	if (all)
		closedir(all);
	return found;
}

/* holds reports whether the memory that the process writes to has the text. */
static int holds(pid_t pid, const char *text)
{
	static char content[LARGE];
	ssize_t size, n;
	int found = 0, fd = open(file(pid, "mem"), O_RDONLY | O_CLOEXEC);
	char *rest = fd < 0 ? "" : readall(file(pid, "maps"), &size);
	for (char *line; !found && (line = strtok_r(rest, "\n", &rest));) {
		unsigned long from, to;
		char mode[8];
		if (sscanf(line, "%lx-%lx %7s", &from, &to, mode) != 3 || mode[1] != 'w')
			continue;
		for (; !found && from < to && (n = pread(fd, content, to - from < LARGE ? to - from : LARGE, from)) > 0; from += n)
			found = memmem(content, n, text, strlen(text)) != NULL;
	}
	if (fd >= 0)
		close(fd);
	return found;
}

/* ends reports whether a process has begun to exit (PF_EXITING), or is gone. */
static int ends(pid_t pid)
{
	ssize_t size;
	unsigned flags = ~0U;
	char *rest = strrchr(readall(file(pid, "stat"), &size), ')');
	if (rest)
		sscanf(rest, ") %*c %*d %*d %*d %*d %*d %u", &flags);
	return flags & 4;
}

/* outside reports whether the process is in a cgroup that is not below ours, in a hierarchy
 * that we know. Of one that ends the kernel says "/" in each hierarchy of version 1
 * (proc_cgroup_show of kernel/cgroup/cgroup.c), wherever it was. */
static int outside(pid_t pid)
{
	ssize_t size;
	char *theirs = readall(file(pid, "cgroup"), &size), *ours = readall("/proc/self/cgroup", &size);
	int root = 0, found = strstr(theirs, "/..") != NULL;
	for (char *b; (b = strtok_r(theirs, "\n", &theirs));) {
		const char *path = strstr(b, ":/"); // of "4:cpu,cpuacct:/PATH"
		const char *a = path ? memmem(ours, size, b, path + 1 - b) : NULL;
		size_t n = a ? strcspn(a, "\n") : 0;
		if (!a || strncmp(a, b, n) == 0)
			continue;
		if (path[2] == 0 && strncmp(b, "0:", 2) != 0)
			root = 1;
		else
			found = 1;
	}
	return found || (root && !ends(pid));
}

/* args: a name that only files of the node have, a file of the node, a text in the
 * supervisor's memory, and what is looked for in turn, a letter each. */
static int breached(char what, pid_t pid, char **args)
{
	char path[SMALL];
	switch (what) {
	case 'r':
		snprintf(path, sizeof path, "/proc/%d/root%s", pid, args[1]);
		return opens(path, O_RDONLY);
	case 'm':
		return has(file(pid, "mountinfo"), args[1]);
	case 'u':
		return has(file(pid, "net/unix"), args[0]);
	case 'f':
		return linked(pid, args[0]);
	case 'x':
		return opens(file(pid, "exe"), O_WRONLY);
	case 'e':
		return has(file(pid, "environ"), args[2]) || holds(pid, args[2]);
	case 'g':
		return outside(pid);
	}
	return 1;
}

/* spy looks at each process that comes, as long as it is there. It says "seen" for
 * each, and "breach" and what when it saw what it should not. */
static void spy(char **args)
{
	for (int seen = 0;;) {
		pid_t pid = next();
		char what = args[3][seen % strlen(args[3])];
		int looks = 0, found = 0;
		for (int i = 0; i < SPINS && looks < SPINS / 10 && !found; i++) {
			found = breached(what, pid, args);
			if (found || access(file(pid, "stat"), F_OK) == 0)
				looks++;
			else if (looks)
				break;
		}
		if (looks)
			printf("seen %d %c\n", ++seen, what);
		if (found)
			printf("breach %c\n", what);
	}
}

/* forge takes the descriptor over which each process that comes is launched, and says on
 * it, as the programs of supervisor/launch do, that the victims, pids of the node, are the
 * helper (-2) and the process (-3) of that launch. */
static void forge(char **victims)
{
	for (;;) {
		pid_t pid = next();
		int fd = -1;
		for (int i = 0; i < SPINS && fd < 0; i++) {
			int process = syscall(SYS_pidfd_open, pid, 0);
			if (process < 0)
				continue;
			fd = syscall(SYS_pidfd_getfd, process, 3, 0);
			close(process);
		}
		for (char **one = victims; fd >= 0 && *one; one++)
			for (int what = -2; what >= -3; what--) {
				int words[2] = { what, atoi(*one) };
				if (send(fd, words, sizeof words, MSG_NOSIGNAL) == sizeof words)
					printf("forged %d %s\n", what, *one);
			}
		if (fd >= 0)
			close(fd);
	}
}

/* lease holds up whoever opens the file, for as long as the kernel lets it. */
static void lease(const char *path)
{
	int fd = open(path, O_RDWR);
	signal(SIGIO, SIG_IGN);
	printf("lease %d\n", fcntl(fd, F_SETLEASE, F_WRLCK));
	for (;; usleep(1000))
		fcntl(fd, F_SETLEASE, F_WRLCK);
}

/* taken takes one more of what the kernel counts: cgroups, keys, terminals, namespaces. */
static int taken(const char *what, long n)
{
	static char content[SMALL * 60], name[SMALL];
	static int size = sizeof content;
	snprintf(name, sizeof name, "/sys/fs/cgroup/%ld", n);
	switch (*what) {
	case 'c':
		return mkdir(name, 0700) == 0;
	case 'k':
		while (size && syscall(SYS_add_key, "user", name, content, size, KEY_SPEC_PROCESS_KEYRING) < 0)
			size /= 2;
		return size;
	case 't':
		return open("/dev/ptmx", O_RDWR | O_NOCTTY) >= 0;
	case 'n':
		return (n || unshare(CLONE_NEWUSER) == 0) && unshare(CLONE_NEWUTS) == 0 && open("/proc/self/ns/uts", O_RDONLY) >= 0;
	}
	return 0;
}

/* take takes so many at most, and then what gets free of them. */
static void take(const char *what, long most)
{
	struct rlimit files;
	long n = 0;
	getrlimit(RLIMIT_NOFILE, &files);
	files.rlim_cur = files.rlim_max;
	setrlimit(RLIMIT_NOFILE, &files);
	while (n < most && taken(what, n))
		n++;
	printf("has %ld\n", n);
	for (; n < most; usleep(1000))
		n += taken(what, n);
	pause();
}

int main(int count, char **args)
{
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (count == 3 && strcmp(args[1], "hit") == 0)
		hit(atoi(args[2]));
	if (count == 6 && strcmp(args[1], "spy") == 0)
		spy(args + 2);
	if (count >= 3 && strcmp(args[1], "forge") == 0)
		forge(args + 2);
	if (count == 3 && strcmp(args[1], "lease") == 0)
		lease(args[2]);
	if (count == 4 && strcmp(args[1], "take") == 0)
		take(args[2], atol(args[3]));
	return 2;
}
